from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.controller import Endpoint
from cluster.placement import Placement, cpu_share, plan_placement, worker_threads
from cluster.ray_launcher import router_config, worker_config
from common.config import parse_config
from common.errors import ConfigError


def _placement(cpus: float = 2, gpus: float = 0, **tree: Any) -> Placement:
    return plan_placement(parse_config(tree), cpus, gpus)


def test_split_has_one_slot_for_each_router_and_worker() -> None:
    placement = _placement(prefill={"workers": 2}, decode={"workers": 2}, router={"replicas": 2})
    ids = [slot.id for slot in placement.slots]
    assert ids == ["router-0", "router-1", "prefill-0", "prefill-1", "decode-0", "decode-1"]
    assert sum(bundle["CPU"] for bundle in placement.bundles) <= 2


def test_colocated_workers_do_both() -> None:
    placement = _placement(mode="colocated", prefill={"workers": 0}, decode={"workers": 1})
    assert [(slot.id, slot.role) for slot in placement.workers] == [("both-0", "both")]


def test_workers_started_by_hand_get_no_slot() -> None:
    placement = _placement(prefill={"addresses": ["10.0.0.1:1"]})
    assert [slot.id for slot in placement.workers] == ["decode-0"]


@given(st.floats(0.01, 512), st.integers(1, 200))
def test_shares_fit_whenever_a_hundredth_each_does(cpus: float, slots: int) -> None:
    share = cpu_share(cpus, slots)
    assert 0.01 <= share <= 1
    if cpus >= slots / 100:
        assert share * slots <= cpus + 1e-9


def test_cuda_needs_a_gpu_for_each_worker() -> None:
    with pytest.raises(ConfigError, match=r"2 workers need a GPU each, Ray has 1"):
        _placement(gpus=1, engine={"device": "cuda"})
    bundles = _placement(gpus=2, engine={"device": "cuda"}).bundles
    assert [bundle.get("GPU", 0) for bundle in bundles] == [0, 1, 1]


def test_auto_takes_gpus_only_when_all_workers_get_one() -> None:
    assert [slot.num_gpus for slot in _placement(gpus=8).workers] == [1, 1]
    assert [slot.num_gpus for slot in _placement(gpus=1).workers] == [0, 0]


def test_threads_are_a_nodes_cores_over_its_workers() -> None:
    slots = _placement(prefill={"workers": 2}).slots  # router, prefill ×2, decode
    threads = worker_threads(slots, ["a", "a", "b", "b"], {"a": 8, "b": 6}, None)
    assert threads == {"prefill-0": 8, "prefill-1": 3, "decode-0": 3}
    assert set(worker_threads(slots, ["a"] * 4, {"a": 2}, None).values()) == {1}
    assert set(worker_threads(slots, ["a"] * 4, {"a": 2}, 5).values()) == {5}


def test_routers_get_consecutive_ports_and_keep_them() -> None:
    config = parse_config({"router": {"replicas": 2, "port": 9000}})
    slot = plan_placement(config, 2, 0).routers[1]
    first = router_config(config, slot, None).router
    assert (first.port, first.grpc_port) == (9001, 0)
    again = router_config(config, slot, Endpoint(http_url="http://h:9001", grpc_url="grpc://h:4567")).router
    assert (again.port, again.grpc_port) == (9001, 4567)


def test_a_worker_gets_its_threads_and_nothing_else_changes() -> None:
    config = parse_config({})
    changed = worker_config(config, 3)
    assert changed.engine.threads == 3
    assert changed.model_copy(update={"engine": config.engine}) == config
