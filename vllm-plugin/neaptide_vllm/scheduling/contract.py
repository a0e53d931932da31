"""What the scheduler relies on in vLLM: names, signatures and calls, read from the sources without importing them.

``contract.json`` holds what was agreed. A server whose vLLM differs runs vLLM's own scheduler.
"""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

CONTRACT = Path(__file__).with_name("contract.json")
Facts = dict[str, Any]
"""Each fact by its name. ``None`` stands for what is not there."""


class Reliance(NamedTuple):
    """What we rely on in a class.

    ``methods``: their parameters. ``attributes``: names that its methods assign, or that it declares. ``abstract``:
    whether its abstract methods must be those that we implement.
    """

    methods: Sequence[str] = ()
    attributes: Sequence[str] = ()
    abstract: bool = False


RELIANCES: Mapping[str, Reliance] = {
    "v1/core/sched/scheduler.py:Scheduler": Reliance(
        methods=(
            "schedule",
            "_reserve_prefill_lookahead",
            "_preempt_request",
            "_request_blocks_can_be_freed",
            "_is_blocked_waiting_status",
            "update_from_output",
            "add_request",
            "finish_requests",
            "_free_request",
            "make_stats",
        ),
        attributes=(
            "block_size",
            "current_step",
            "kv_cache_config",
            "kv_cache_manager",
            "kv_holding_waiting",
            "max_model_len",
            "max_num_active_reqs",
            "max_num_scheduled_tokens",
            "num_prefill_lookahead",
            "num_waiting_for_streaming_input",
            "policy",
            "requests",
            "requires_kv_delivery",
            "running",
            "waiting",
        ),
    ),
    "v1/core/sched/async_scheduler.py:AsyncScheduler": Reliance(),
    "v1/core/sched/request_queue.py:RequestQueue": Reliance(abstract=True),
    "v1/core/sched/request_queue.py:PriorityRequestQueue": Reliance(
        methods=("add_request", "pop_request", "peek_request", "remove_requests")
    ),
    "v1/core/sched/output.py:SchedulerOutput": Reliance(
        attributes=(
            "num_scheduled_tokens",
            "preempted_req_ids",
            "scheduled_spec_decode_tokens",
            "total_num_scheduled_tokens",
        )
    ),
    "v1/core/kv_cache_manager.py:KVCacheManager": Reliance(
        methods=("get_computed_blocks",), attributes=("block_pool", "watermark_blocks")
    ),
    "v1/core/block_pool.py:BlockPool": Reliance(methods=("get_num_free_blocks",), attributes=("num_gpu_blocks",)),
    "v1/request.py:Request": Reliance(
        methods=("num_tokens", "num_output_tokens", "__lt__"),
        attributes=(
            "_all_token_ids",
            "arrival_time",
            "max_tokens",
            "next_decode_eligible_step",
            "num_computed_tokens",
            "num_output_placeholders",
            "num_prompt_tokens",
            "priority",
            "request_id",
            "sampling_params",
            "spec_token_ids",
            "status",
        ),
    ),
}
"""What we rely on, by ``FILE:CLASS`` under vLLM's package."""
CALLS = {
    "v1/core/sched/scheduler.py:Scheduler.schedule": (
        "_reserve_prefill_lookahead",
        "allocate_slots",
        "peek_request",
        "pop_request",
    )
}
"""Methods whose number of calls in another one must stay: the clamp has to stand before every allocation."""
ALIKE = ("v1/core/sched/scheduler.py:Scheduler._reserve_prefill_lookahead",)
"""Methods whose code must stay as it is."""


def facts_of(package: Path) -> Facts:
    """The facts of vLLM's sources in ``package``, the directory of the module ``vllm``."""
    facts: Facts = {}
    for name, reliance in RELIANCES.items():
        file, class_name = name.split(":")
        found = _class(package / file, class_name)
        facts[name] = None if found is None else [ast.unparse(base) for base in found.bases]
        methods = {} if found is None else _methods(found)
        for method in reliance.methods:
            facts[f"{name}.{method}"] = _parameters(methods[method]) if method in methods else None
        assigned = set() if found is None else set(_assigned(found))
        for attribute in reliance.attributes:
            facts[f"{name}.{attribute}"] = attribute in assigned or None
        if reliance.abstract:
            facts[f"{name}: abstract"] = sorted(each for each, node in methods.items() if _is_abstract(node))
    for name, called in CALLS.items():
        node = _method(package, name)
        names = [] if node is None else [_called(each) for each in ast.walk(node) if isinstance(each, ast.Call)]
        facts |= {f"{name}: calls of {each}": names.count(each) for each in called}
    for name in ALIKE:
        node = _method(package, name)
        facts[f"{name}: code"] = None if node is None else _code(node)
    return facts


def agreed() -> Facts:
    """The facts of ``contract.json``."""
    known: Facts = json.loads(CONTRACT.read_text(encoding="utf-8"))
    return known


def differences(found: Facts, expected: Facts) -> list[str]:
    """A line for each fact that is not as expected."""
    lines: list[str] = []
    for name in sorted(expected.keys() | found.keys()):
        now, before = found.get(name), expected.get(name)
        if now != before:
            lines.append(f"{name} is gone" if now is None else f"{name}: {now}, not {before}")
    return lines


def _class(path: Path, name: str) -> ast.ClassDef | None:
    if not path.exists():
        return None
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}


def _method(package: Path, name: str) -> ast.FunctionDef | None:
    place, method = name.rsplit(".", 1)
    file, class_name = place.split(":")
    found = _class(package / file, class_name)
    return None if found is None else _methods(found).get(method)


def _parameters(node: ast.FunctionDef) -> list[str]:
    """Parameter names, with ``=`` after optional ones, and the decorators before them."""
    arguments = node.args
    names = [each.arg for each in arguments.posonlyargs + arguments.args]
    first_optional = len(names) - len(arguments.defaults)
    marked = [name + "=" * (index >= first_optional) for index, name in enumerate(names)]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    marked += [each.arg + "=" * (default is not None) for each, default in keywords]
    return [f"@{ast.unparse(each)}" for each in node.decorator_list] + marked


def _assigned(node: ast.ClassDef) -> Iterator[str]:
    """Attributes that the class declares or its methods assign to ``self``."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            yield each.attr
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id


def _is_abstract(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(each) == "abstractmethod" for each in node.decorator_list)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def _code(node: ast.FunctionDef) -> str:
    """The body without its docstring and comments."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return "\n".join(ast.unparse(each) for each in body)
