"""`ModulePolicies`: applied, saved and loaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ebb
from ebb_tests.programs import planned as programs
from ebb_tests.programs.planned import planned


def test_plan_is_saved_and_loaded(tmp_path):
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


def test_names_of_modules_are_no_globs_in_files(tmp_path):
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


def test_globs_of_operators_are_saved_and_loaded(tmp_path):
    policy = ebb.Policy(
        [ebb.Rule("aten::[am]*", ebb.SAVE, nth=2), ebb.Rule("aten::?elu", ebb.SAVE)],
        inputs=ebb.OFFLOAD,
    )
    ebb.ModulePolicies({"x": policy, "y": policy}).save(tmp_path / "p.toml")

    found = ebb.ModulePolicies.load(tmp_path / "p.toml")

    assert found.policies["x"].to_toml() == policy.to_toml() == found.policies["y"].to_toml()
    assert len(found._groups()) == 1
    assert (tmp_path / "p.toml").read_text().count("[[regions]]") == 1


def test_rule_takes_one_line(tmp_path):
    policy = ebb.Policy(
        [
            ebb.Rule("aten::mm", ebb.SAVE, nth=2, module='a\nb\x7f"}, {'),
            ebb.Rule("aten::gelu", ebb.OFFLOAD, min_bytes=1024, dtype=torch.bfloat16),
            ebb.Rule("aten::add.Tensor", ebb.SAVE, every=3, per_module=True),
        ],
        inputs=ebb.OFFLOAD,
    )

    ebb.ModulePolicies({"x": policy, "y": policy}).save(tmp_path / "p.toml")

    lines = (tmp_path / "p.toml").read_text().split("\n")
    assert sum("op =" in line for line in lines) == 3
    assert ebb.ModulePolicies.load(tmp_path / "p.toml").policies == {"x": policy, "y": policy}


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
        ("ahead = 1\nregions = []", "ahead: must be true or false; got 1"),
        ('ahead = "no"\nregions = []', "ahead: must be true or false"),
        ("regions = []\noffload = 3", "p.toml: offload: "),
        ("regions = []\n[offload]\nin_flight = 3", "p.toml: offload.in_flight: "),
        ("regions = []\n[offload]\nin_flight_bytes = -1", "p.toml: offload.in_flight_bytes: "),
        ("regions = []\n[offload]\nprefetch_bytes = 'much'", "p.toml: offload.prefetch_bytes: "),
        ("regions = []\n[offload]\nkeep_last = '1MiB'", "p.toml: offload.keep_last: "),
    ],
)  # fmt: skip
def test_invalid_file_raises(text, message, tmp_path):
    (tmp_path / "p.toml").write_text(text)

    with pytest.raises(ValueError, match=message):
        ebb.ModulePolicies.load(tmp_path / "p.toml")


def test_invalid_policies_raise_and_apply_nothing():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    policies = ebb.ModulePolicies({"0": ebb.policies.recompute_all, "7": ebb.policies.save_matmuls})

    with pytest.raises(ValueError, match="no module matches '7'"):
        policies.apply(model)
    with pytest.raises(ValueError, match=r"no module matches '\*'; ModulePolicies takes exact"):
        ebb.ModulePolicies({"*": ebb.policies.save_all}).apply(model)
    with pytest.raises(TypeError, match=r"ebb.Policy.parse\('save_matmuls'\); got 'save_all'"):
        ebb.ModulePolicies({"0": "save_all"})
    ebb.apply(model, modules="0").remove()


@pytest.mark.parametrize("policies", [{}, {"": ebb.policies.save_matmuls}])
def test_no_regions_and_one_region_are_saved_and_loaded(tmp_path, policies):
    ebb.ModulePolicies(policies).save(tmp_path / "p.toml")

    with ebb.ModulePolicies.load(tmp_path / "p.toml").apply(nn.Linear(1, 1)) as handle:
        assert handle.names == tuple(policies)


def test_sizes_in_files_may_have_units(tmp_path):
    (tmp_path / "p.toml").write_text('regions = []\n[offload]\nin_flight_bytes = "2MiB"\n')

    found = ebb.ModulePolicies.load(tmp_path / "p.toml")

    assert found._settings.offload == {"in_flight_bytes": 2 * 2**20}


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

    with ebb.region():  # the next region runs without them
        assert ebb._C.offload_settings()["keep_last"] == 0
        assert ebb._C.ahead_settings()["regions"] == 1
    assert settings() == before


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


def test_settings_changed_after_a_handle_was_removed_stay(settings):
    model = nn.Sequential(nn.Linear(2, 2))
    with_settings(model).remove()
    ebb.config.ahead.regions = 2

    del model

    assert settings()["ahead.regions"] == 2


def test_only_rules_that_page_use_page_pools():
    rule = ebb.Rule("*", ebb.SAVE, name="page")
    assert not ebb.ModulePolicies({"0": ebb.Policy([rule])})._settings.pages
    assert ebb.ModulePolicies({"0": ebb.Policy({"aten::mm": ebb.PAGE})})._settings.pages
