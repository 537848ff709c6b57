"""Ranks, as they describe themselves to each other, of hosts that are not there."""

from titan_offload.budget import Claim, RankFacts
from titan_offload.host_memory import HostMemory, MemoryLimit
from titan_offload.topology import Device

GIB = 1024**3


def limit(kind, group, free_bytes, own_bytes=0, limit_bytes=None):
    """The source is the group's name."""
    return MemoryLimit(kind, group, group, free_bytes if limit_bytes is None else limit_bytes, free_bytes, own_bytes)


def make_facts(rank, need=None, host=1000, limits=(), others=0, numa_node=-1, **kwargs):
    """``need`` and ``others`` are bytes of claims, ``host`` the bytes that the host has free."""
    claims = None
    if need is not None:
        claims = (Claim("block inputs", need), Claim("gradients", others, is_offload=False))
    values = {
        "rank": rank,
        "host": "a",
        "hostname": kwargs.get("host_id", "a"),
        "device_name": f"cuda:{rank}",
        "device": Device(numa_node=numa_node),
        "memory": HostMemory((limit("host", "meminfo", host), *limits)),
        "claims": claims,
        "slot_bytes": 0,
        "num_slots": 0,
        "stage": f"stage {rank}",
        "config": {},
    }
    if "host_id" in kwargs:
        values["host"] = f"identity of {kwargs.pop('host_id')}"
    return RankFacts(**values | kwargs)
