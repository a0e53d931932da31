"""Public interface for scheduling policies and orders of the offline pool, see write-a-policy.md.

A policy is a class derived from ``Scheduler``. Its ``pack`` fills a ``Draft`` of the next step. An order is a function
of a ``PromptPool`` and the rows to put in order.
"""

from neaptide.engine.arrays import BoolArray, FloatArray, IntArray
from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import CostModel, HeadroomPredictor, Prediction
from neaptide.engine.kv.draft import NO_HIT, PrefixHit
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.offline.planning.blend import Ranked
from neaptide.engine.offline.planning.plan import Order, PromptPool, dual_scanned
from neaptide.engine.offline.prefix_tree import NO_NODE, PrefixTree
from neaptide.engine.offline.row_source import RowKey
from neaptide.engine.offline.token_file import TokenFile
from neaptide.engine.offline.turns import ByAge, Turns
from neaptide.engine.params import RequestClass, Tier
from neaptide.engine.request import Request, RequestStatus
from neaptide.engine.scheduler.actions import Admit
from neaptide.engine.scheduler.base import CacheMaker, Scheduler
from neaptide.engine.scheduler.baselines.one_queue import (
    ArrivalKey,
    OneQueueScheduler,
    arrival_order,
    priority_order,
)
from neaptide.engine.scheduler.baselines.vllm_v1 import VllmV1Fcfs, VllmV1Priority
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.scheduler.packing import NeaptideScheduler
from neaptide.engine.scheduler.queues import OnlineOrder, deadline_order
from neaptide.engine.scheduler.residual import paced_tokens
from neaptide.engine.steps.plan import BatchShape
from neaptide.engine.steps.step import Step

__all__ = [
    "NO_HIT",
    "NO_NODE",
    "Admit",
    "ArrivalKey",
    "BatchShape",
    "BoolArray",
    "ByAge",
    "CacheMaker",
    "CostModel",
    "Draft",
    "FloatArray",
    "HeadroomPredictor",
    "IntArray",
    "KVCacheManager",
    "NeaptideScheduler",
    "OneQueueScheduler",
    "OnlineOrder",
    "Order",
    "Prediction",
    "PrefixHit",
    "PrefixTree",
    "PromptPool",
    "Ranked",
    "Request",
    "RequestClass",
    "RequestStatus",
    "RowKey",
    "Scheduler",
    "SchedulerConfig",
    "Step",
    "Tier",
    "TokenFile",
    "Turns",
    "VllmV1Fcfs",
    "VllmV1Priority",
    "arrival_order",
    "deadline_order",
    "dual_scanned",
    "paced_tokens",
    "priority_order",
]
