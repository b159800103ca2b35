"""Modules and their policies: applied, written and read."""

from __future__ import annotations

import pytest
from torch import nn

import ebb
from ebb_tests.programs import planned as programs
from ebb_tests.programs.planned import planned


def test_a_plan_in_a_file(tmp_path):
    program, plan = planned(programs.llama, 0.5)
    path = tmp_path / "policy.toml"

    plan.save(path)
    found = ebb.ModulePolicies.load(path)

    assert found.policies.keys() == plan.policies.keys()
    for name, policy in plan.policies.items():
        assert found.policies[name].to_toml() == policy.to_toml()
    with found.apply(program.model) as handle:
        assert set(handle.names) == set(plan.policies)
        assert ebb.profile(program.step, steps=1).peak <= 0.5 * plan.plain_peak


ODD = [
    "a[0]",
    "*",
    "?x",
    "[!a]",
    'quo"te',
    "back\\slash",
    "ümlaut",
    "tab\there",
    "ж",
    "del\x7f",
    " ",
]


def test_names_with_odd_characters(tmp_path):
    """Of modules: each is itself, and no glob."""
    model = nn.Module()
    for name in [*ODD, "a0", "ax", "0"]:
        model.add_module(name, nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    policies = dict.fromkeys(ODD, ebb.policies.recompute_all)
    policies["a[0].0"] = ebb.policies.save_matmuls
    del policies["a[0]"]

    ebb.ModulePolicies(policies).save(tmp_path / "p.toml")
    found = ebb.ModulePolicies.load(tmp_path / "p.toml")

    assert found.policies.keys() == policies.keys()
    with found.apply(model) as handle:
        assert sorted(handle.names) == sorted(policies)


def test_operators_with_globs(tmp_path):
    """Brackets in an operator's glob come back as they were."""
    policy = ebb.Policy(
        [ebb.Rule("aten::[am]*", ebb.SAVE, nth=2), ebb.Rule("aten::?elu", ebb.SAVE)],
        inputs=ebb.OFFLOAD,
    )
    ebb.ModulePolicies({"x": policy, "y": policy}).save(tmp_path / "p.toml")

    found = ebb.ModulePolicies.load(tmp_path / "p.toml")

    assert found.policies["x"].to_toml() == policy.to_toml() == found.policies["y"].to_toml()
    assert len(found._groups()) == 1
    assert (tmp_path / "p.toml").read_text().count("[[regions]]") == 1


def test_a_file_without_regions(tmp_path):
    ebb.ModulePolicies({}).save(tmp_path / "p.toml")

    assert ebb.ModulePolicies.load(tmp_path / "p.toml").policies == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("default = 'save'", "default"),
        ("regions = 3", "regions: must be an array of tables"),
        ("[[regions]]\ndefault = 'save'", r"regions\[0\]\.modules: must be an array of names"),
        ("[[regions]]\nmodules = [1]", r"regions\[0\]\.modules"),
        ("[[regions]]\nmodules = ['a', 'a']", "module 'a' is listed twice"),
        ("[[regions]]\nmodules = ['a']\ndefault = 'keep'", r"regions\[0\]\.default"),
        ("[[regions]]\nmodules = ['a']\n[[regions.rules]]\nop = 'aten::nothing_like'\n"
         "decision = 'save'", r"regions\[0\]\.rules\[0\]"),
        ("[[regions", "p.toml"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong(text, message, tmp_path):
    (tmp_path / "p.toml").write_text(text)

    with pytest.raises(ValueError, match=message):
        ebb.ModulePolicies.load(tmp_path / "p.toml")


def test_modules_that_are_not_there():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    policies = ebb.ModulePolicies({"0": ebb.policies.recompute_all, "7": ebb.policies.save_matmuls})

    with pytest.raises(ValueError, match="no module matches '7'"):
        policies.apply(model)
    ebb.apply(model, modules="0").remove()  # nothing was left behind


def test_a_model_that_is_one_region_in_a_file(tmp_path):
    ebb.ModulePolicies({"": ebb.policies.save_matmuls}).save(tmp_path / "p.toml")

    with ebb.ModulePolicies.load(tmp_path / "p.toml").apply(nn.Linear(1, 1)) as handle:
        assert handle.names == ("",)


@pytest.fixture
def settings():
    """The settings of OFFLOAD and of replays ahead, with replays ahead switched on."""
    ahead = ebb.config.to_dict()
    ebb.config.ahead.regions = 1
    yield ebb.config.to_dict
    ebb.config.update(ahead)


def with_settings(model):
    policies = ebb.ModulePolicies({"0": ebb.policies.recompute_all}, {"keep_last": 3}, ahead=False)
    return policies.apply(model)


def test_settings_end_when_the_model_is_freed(settings):
    before = settings()
    model = nn.Sequential(nn.Linear(2, 2))
    with_settings(model)
    assert settings()["offload.keep_last"] == 3
    assert settings()["ahead.regions"] == 0

    del model

    assert settings() == before


def test_the_next_region_runs_without_the_settings_of_a_freed_model(settings):
    model = nn.Sequential(nn.Linear(2, 2))
    with_settings(model)

    del model
    with ebb.region():
        assert ebb._C.offload_settings()["keep_last"] == 0
        assert ebb._C.ahead_settings()["regions"] == 1


def test_settings_of_models_that_are_freed_in_any_order_end(settings):
    before = settings()
    first, second = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    handle = with_settings(first)
    with_settings(second)

    del first
    handle.remove()
    assert settings()["offload.keep_last"] == 3
    del second

    assert settings() == before


def test_settings_that_the_program_changes_after_a_model_was_removed_stay(settings):
    model = nn.Sequential(nn.Linear(2, 2))
    with_settings(model).remove()
    ebb.config.ahead.regions = 2

    del model

    assert settings()["ahead.regions"] == 2


def test_a_name_that_says_page_does_not_use_page_pools():
    rule = ebb.Rule("*", ebb.SAVE, name="page")
    assert not ebb.ModulePolicies({"0": ebb.Policy([rule])})._settings.pages
    assert ebb.ModulePolicies({"0": ebb.Policy({"aten::mm": ebb.PAGE})})._settings.pages


def test_names_are_no_globs_and_policies_no_text():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"no module matches '\*'; ModulePolicies takes exact"):
        ebb.ModulePolicies({"*": ebb.policies.save_all}).apply(model)
    with pytest.raises(TypeError, match=r"ebb.Policy.parse\('save_matmuls'\); got 'save_all'"):
        ebb.ModulePolicies({"0": "save_all"})
