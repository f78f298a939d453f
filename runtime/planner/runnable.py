"""What of a plan this version of the engine refuses to run. Shrinks as the engine grows.

A plan is about the machine and the model; this note is beside it, and changes no ranking.
"""

from coterie.runtime.planner.device import Device
from coterie.runtime.planner.layouts import Layout
from coterie.runtime.planner.shape import ModelShape

ENGINE_MODEL_TYPES = ("llama", "mixtral", "qwen3_moe", "granitemoe")
_ENGINE_DTYPES = ("bfloat16", "float32")


def refusals(shape: ModelShape, layout: Layout) -> list[str]:
    """What this version refuses about the model and the layout; empty if it runs both."""
    found = []
    if shape.model_type not in ENGINE_MODEL_TYPES:
        found.append(f"model type {shape.model_type}")
    if shape.weights_dtype not in _ENGINE_DTYPES:
        found.append(f"{shape.weights_dtype} weights")
    if layout.tp > 1:
        found.append("tensor parallelism")
    if layout.pp > 1:
        found.append("pipeline parallelism")
    if layout.is_routed and layout.expert_shards > 1:
        found.append("expert shards")
    if shape.is_moe and layout.expert_copies > 1:
        found.append("replicas with all experts each (start one deployment for each)")
    return found


def note(shape: ModelShape, layout: Layout, device: Device) -> str:
    """One sentence, or "" if this version runs it."""
    found = refusals(shape, layout)
    if device.kind != "cpu":
        found.append("devices other than CPUs")
    return f"this version refuses: {', '.join(found)}" if found else ""
