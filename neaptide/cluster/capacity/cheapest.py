"""The cheapest of several plans, by the hour and by the offline work that comes with it."""

from collections.abc import Sequence

from neaptide.cluster.capacity.result import Plan
from neaptide.durations import HOUR_S


def credit_per_token(plans: Sequence[Plan]) -> float:
    """Worth of an offline token: its lowest price on a device without chats; 0 without offline work."""
    prices = (plan.alone_price_per_token for plan in plans)
    return min((price for price in prices if price is not None), default=0.0)


def net_per_hour(plan: Plan, credit: float) -> float | None:
    """The hourly price less what the plan's offline work would cost elsewhere; None without an answer.

    Of two plans the one with the smaller net price is cheaper as soon as there is enough offline work for both: what it
    leaves undone is bought for ``credit`` per token.
    """
    if plan.cost is None:
        return None
    tokens_per_s = plan.offline.whole.tokens_per_s if plan.offline is not None else 0.0
    return plan.cost - credit * HOUR_S * tokens_per_s


def cheapest(plans: Sequence[Plan]) -> Plan | None:
    """The first of the plans with the smallest net price; None if none has an answer."""
    credit = credit_per_token(plans)
    prices = [(net, number) for number, plan in enumerate(plans) if (net := net_per_hour(plan, credit)) is not None]
    return plans[min(prices)[1]] if prices else None
