"""Links by name, number and file, and the flags that say what a node is."""

import json

import pytest

from titan_offload.planner.plan_machine import NAMED, parse_link, plan_machine, read_link
from titan_offload.planner.shapes import Machine


def port(d2h, h2d, both_d2h=1.0, both_h2d=1.0):
    names = ("d2h_gb_per_s", "h2d_gb_per_s", "both_d2h_gb_per_s", "both_h2d_gb_per_s")
    return dict(zip(names, (d2h, h2d, both_d2h, both_h2d), strict=True))


def write_link(path, *shared):
    devices = [{"alone": port(50, 50, 50, 50), "shared": rates} for rates in shared]
    path.write_text(json.dumps({"format": 1, "hostname": "node-a", "devices": devices}))
    return path


def test_named_links():
    """The planner's figures (ml-engineering book): PCIe 4 31, PCIe 5 55.43, C2C 450 GB/s, one way."""
    rates = {name: (link.d2h_gb_per_s, link.h2d_gb_per_s) for name, link in NAMED.items()}
    assert rates == {"pcie4": (31.0, 31.0), "pcie5": (55.43, 55.43), "c2c": (450.0, 450.0)}
    assert parse_link("pcie5") is NAMED["pcie5"]


def test_a_number_is_both_directions_and_a_pair_is_d2h_and_h2d():
    assert parse_link("25").rates(both_ways=False) == (25.0, 25.0)
    assert parse_link("170/411").rates(both_ways=True) == (170.0, 411.0)


@pytest.mark.parametrize("text", ["0", "-3", "nan", "inf", "25/0"])
def test_rates_that_no_link_has(text):
    with pytest.raises(ValueError, match=r"^--link .* is not allowed: set it to GB/s above 0$"):
        parse_link(text)


@pytest.mark.parametrize("text", ["pcie6", "fast", "", "1/2/3", "25GB/s"])
def test_what_is_no_link(text):
    with pytest.raises(ValueError, match=r"is no link: give pcie4, pcie5, c2c, a number .*probe$"):
        parse_link(text)


def test_a_measured_link_is_the_slowest_device_of_each_direction(tmp_path):
    path = write_link(tmp_path / "link.json", port(20, 30, 9, 8), port(25, 12, 7, 11))
    link = parse_link(str(path))
    assert link.rates(both_ways=False) == (20, 12)
    assert link.rates(both_ways=True) == (7, 8)
    assert "2 devices" in link.source and "node-a" in link.source


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"devices": []}', '{"devices": [{"shared": {}}]}', '{"devices": 3}', b"\xff"],
)
def test_files_that_are_no_link(tmp_path, content):
    path = tmp_path / "link.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"^.*link\.json is no link\.json .*: write one with titan-offload probe"):
        read_link(path)


@pytest.mark.parametrize("rate", [0, -1, "25", None, True])
def test_a_file_with_rates_that_no_link_has(tmp_path, rate):
    path = write_link(tmp_path / "link.json", port(25, rate))
    with pytest.raises(ValueError, match=r"h2d_gb_per_s = .* is not above 0"):
        read_link(path)


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"^there is no .*nope\.json: write one with titan-offload probe"):
        parse_link(str(tmp_path / "nope.json"))


def test_machine_of_the_flags():
    machine = plan_machine(
        parse_link("170/411"),
        nodes=4,
        gpus_per_node=6,
        gpus_per_switch=2,
        host_memory=1024.0,
        gpu_memory=80.0,
        tflops=400.0,
    )
    assert machine == Machine(170.0, 411.0, 2, 400.0, 6, 4, 1024.0, 80.0)
    assert plan_machine(parse_link("pcie4")) == Machine(31.0, 31.0, 1, 500.0, 8, 1)


def test_a_measured_link_says_how_many_devices_a_node_has(tmp_path):
    """And its rates are shared already."""
    link = read_link(write_link(tmp_path / "link.json", port(20, 30, 9, 8), port(25, 12, 7, 11)))
    assert plan_machine(link) == Machine(20, 12, 1, 500.0, 2, 1)
    assert plan_machine(link, both_ways=True, gpus_per_node=4) == Machine(7, 8, 1, 500.0, 4, 1)
    with pytest.raises(ValueError, match=r"^--gpus-per-switch 2 does not go with .*: leave it out$"):
        plan_machine(link, gpus_per_switch=2)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"gpus_per_switch": 9}, "--gpus-per-switch 9 is more than --gpus-per-node 8"),
        ({"gpus_per_node": 4, "gpus_per_switch": 5}, "--gpus-per-switch 5 is more than --gpus-per-node 4"),
        ({"nodes": 0}, "--nodes 0 is not allowed"),
        ({"gpus_per_node": 0}, "--gpus-per-node 0 is not allowed"),
        ({"gpus_per_switch": 0}, "--gpus-per-switch 0 is not allowed"),
        ({"host_memory": 0.0}, "--host-memory 0 is not allowed"),
        ({"gpu_memory": -1.0}, "--gpu-memory -1 is not allowed"),
        ({"tflops": float("nan")}, "--tflops nan is not allowed"),
    ],
)
def test_flags_that_are_not_allowed(flags, text):
    with pytest.raises(ValueError, match=f"^{text}.*: .*set it to"):
        plan_machine(parse_link("pcie5"), **flags)
