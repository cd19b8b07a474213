"""Offers of weights as plain data, so that they reach an engine in another process without pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nemotron_steps.engine.weight_sync.offers import SHARED_MEMORY, OfferedWeights, ReceivingOffer
from nemotron_steps.engine.weight_sync.plan import Bucket, Entry, WeightPlan
from nemotron_steps.engine.weight_sync.streams import StreamOffer

_CLASSES = {kind.__name__: kind for kind in (torch.Tensor, torch.storage.TypedStorage, torch.UntypedStorage)}
"""What a CUDA IPC handle names beside numbers and bytes."""


def to_plain(offered: OfferedWeights) -> dict[str, Any]:
    """Numbers, strings, bytes, lists and mappings alone."""
    plans = [offer.plan for offer in offered.offers]
    return {
        "channel": offered.channel,
        "plan": [_plain_bucket(bucket) for bucket in plans[0].buckets],
        "offers": [_plain_offer(offer) for offer in offered.offers],
    }


def from_plain(info: Mapping[str, Any], rank: int) -> ReceivingOffer:
    """The offer of one worker."""
    plan = WeightPlan(tuple(_bucket(bucket) for bucket in info["plan"]))
    found = info["offers"][rank]
    if found["transport"] == SHARED_MEMORY:
        offer: Any = (plan, found["path"])
    else:
        staging = found["staging"]
        offer = StreamOffer(plan, found["sender"], None if staging is None else tuple(_value(each) for each in staging))
    address, place = found["address"], found["place"]
    return ReceivingOffer(
        found["transport"],
        offer,
        None if address is None else (address[0], address[1]),
        found["name"],
        None if place is None else (place[0], place[1]),
    )


def _plain_bucket(bucket: Bucket) -> dict[str, Any]:
    entries = [[e.name, list(e.shape), str(e.dtype).removeprefix("torch."), e.start] for e in bucket.entries]
    return {"entries": entries, "bytes": bucket.bytes, "start": bucket.start}


def _bucket(plain: Mapping[str, Any]) -> Bucket:
    entries = (
        Entry(name, tuple(shape), getattr(torch, dtype), start) for name, shape, dtype, start in plain["entries"]
    )
    return Bucket(tuple(entries), plain["bytes"], plain["start"])


def _plain_offer(offer: ReceivingOffer) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "transport": offer.transport,
        "name": offer.name,
        "address": None if offer.address is None else list(offer.address),
        "place": None if offer.place is None else list(offer.place),
    }
    if offer.transport == SHARED_MEMORY:
        return {**plain, "path": offer.offer[1]}
    staging = offer.offer.staging
    staged = None if staging is None else [_plain_value(value) for value in staging]
    return {**plain, "sender": offer.offer.sender, "staging": staged}


def _plain_value(value: Any) -> Any:
    if isinstance(value, type):
        return {"class": value.__name__}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return list(value) if isinstance(value, tuple) else value


def _value(plain: Any) -> Any:
    if isinstance(plain, dict):
        return _CLASSES[plain["class"]] if "class" in plain else getattr(torch, plain["dtype"])
    return tuple(plain) if isinstance(plain, list) else plain
