"""torchtitan's activation-checkpointing policies under EBB=1, and ebb's policy and metrics."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchtitan.distributed.activation_checkpoint", reason="needs torchtitan")

from types import SimpleNamespace

from torchtitan.components import metrics as titan
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

import ebb
from ebb._launch import takeover
from ebb.integrations.torchtitan import EbbAC, EbbMetrics
from ebb_tests.frameworks.logged import events


class Decoder(torch.nn.Module):
    """A model with torchtitan's module names. torchtitan's own attention does not run on a CPU."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleDict(
            {
                str(i): torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
                for i in range(6)
            }
        )

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def gradients(config=None):
    torch.manual_seed(0)
    model = Decoder()
    if config is not None:
        config.build().apply(model)
    for _ in range(2):  # a selective policy decides in the first forward
        ebb.reset_stats()
        model.zero_grad()
        torch.manual_seed(1)
        model(torch.randn(2, 16, 64)).square().mean().backward()
    return [p.grad for p in model.parameters()]


@pytest.fixture(scope="module")
def expected():
    return gradients()


@pytest.mark.parametrize("policy", ["torchtitan", "recompute_all", "mm:save,default:recompute"])
def test_our_policy(expected, policy):
    found = gradients(EbbAC.Config(policy=policy))
    assert all(map(torch.equal, found, expected))
    stats = ebb.stats()
    assert set(stats["regions"]) == {f"layers.{i}" for i in range(6)}
    assert stats["total"]["bytes_dropped"] > 0


def test_theirs_under_EBB(expected):
    replayed = {}
    takeover.install(ebb.policies.recompute_all, "1", ())
    try:
        for config in (FullAC.Config(), SelectiveAC.Config()):
            assert all(map(torch.equal, gradients(config), expected))
            total = ebb.stats()["total"]
            assert total["entered"] == 6
            replayed[type(config)] = total["ops_replayed"]
    finally:
        takeover.remove()
    assert 0 < replayed[SelectiveAC.Config] < replayed[FullAC.Config]


@pytest.mark.parametrize("policy", ["nonsense", "no_such_file.toml"])
def test_a_bad_policy_is_an_error(policy):
    with pytest.raises((ValueError, OSError), match=policy):
        EbbAC.Config(policy=policy).build().apply(Decoder())


class NoDevice:
    """Stands for torchtitan's monitor of a device's memory, which there is none of on a CPU."""

    device_name = "CPU"

    def reset_peak_stats(self):
        pass

    def get_peak_stats(self):
        return titan.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)


def test_event_files_have_what_metrics_gives(tmp_path, monkeypatch):
    """Of the last step, although torchtitan logs every second one."""
    monkeypatch.setattr(titan, "build_device_memory_monitor", NoDevice)
    config = EbbMetrics.Config(enable_tensorboard=True, log_freq=2, save_for_all_ranks=False)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    dims = SimpleNamespace(pp_enabled=False, non_data_parallel_size=1)
    processor = config.build(parallel_dims=dims, dump_folder=str(tmp_path))
    processor.num_flops_per_token = 1
    model, own = Decoder(), {}
    EbbAC.Config(policy="recompute_all").build().apply(model)

    for step in range(1, 5):
        for _ in range(step):
            model(torch.randn(2, 16, 64)).square().mean().backward()
        processor.ntokens_since_last_log = 1
        processor.data_loading_times = [0.0]
        if processor.should_log(step):
            processor.log(step, 1.0, 1.0, 1.0, {"mine": step})
            own[step] = processor.metrics
    processor.close()

    found = events(tmp_path)
    assert list(own) == [1, 2, 4]
    for step, expected in own.items():
        assert found["mine"][step] == step
        assert expected["ebb/passes"] == step
        assert expected["ebb/replay_ms"] > 0 < expected["ebb/peak_bytes"]
        for name, value in expected.items():
            logged = torch.tensor(found[name][step])
            assert torch.equal(logged, torch.tensor(value, dtype=torch.float32)), name
