# SPDX-License-Identifier: Apache-2.0
"""Servers of verl's `reward.reward_model`: who asks them, and under which addresses.

verl starts them (`RewardLoopManager`), once per run, on devices of their own. A class whose setting `url` is
reward_model (judges by default) asks each server itself, because the router drops errors' texts. A function with a
parameter `reward_router_address`, as verl's reward functions have it, gets verl's router, "host:port".
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from verl_digen.config import RewardEntry
from verl_digen.reward.functions import FunctionReward
from verl_digen.reward.judges.chat import REWARD_MODEL
from verl_digen.reward.named import find

ROUTER = "reward_router_address"
"""verl's name of a function's parameter."""


@dataclass(frozen=True)
class ServedModel:
    """Addresses of a reward model that is served."""

    addresses: tuple[str, ...]
    """"host:port" of each server."""
    router: str
    """"host:port" of verl's router, which passes a request to one of them."""


UNKNOWN = ServedModel(("reward-model:1",), "reward-model:1")
"""Servers that do not run yet, for checks of what asks them."""


def asks_reward_model(entry: RewardEntry) -> bool:
    """True if the reward needs the servers."""
    found = find(entry)
    if issubclass(found, FunctionReward):
        return ROUTER not in entry.arguments and takes_router(found.function)
    made = found.settings(entry.arguments, entry.key)
    return "url" in {one.name for one in fields(made)} and made.url == REWARD_MODEL


def takes_router(function: Any) -> bool:
    """True if a function names the router's address among its parameters. verl's `get_custom_reward_fn` hides the
    user's function: it is the first argument of a partial call."""
    if isinstance(function, partial) and function.args and callable(function.args[0]):
        function = function.args[0]
    try:
        return ROUTER in inspect.signature(function).parameters
    except (TypeError, ValueError):  # no function, or a compiled one without a signature
        return False


def router_argument(function: Any, router: str | None) -> Mapping[str, str]:
    """Keyword argument of a function that takes the router's address, where there is one."""
    return {ROUTER: router} if router is not None and takes_router(function) else {}


def connected(entry: RewardEntry, served: ServedModel | None) -> RewardEntry:
    """The entry with the servers' addresses among its arguments, if it asks them.

    Example:
        served = ServedModel(("10.0.0.1:8000",), "10.0.0.2:9000")
        connected(RewardEntry("yes_no", 1.0, "yes_no", {}, None), served).arguments  # {"url": ["http://10.0.0.1:8000"]}
    """
    if served is None or not asks_reward_model(entry):
        return entry
    urls = [f"http://{address}" for address in served.addresses]
    own = {ROUTER: served.router} if issubclass(find(entry), FunctionReward) else {"url": urls}
    return replace(entry, arguments={**entry.arguments, **own})
