"""Names of kernel backends -> objects. Backends are imported only when chosen."""

from importlib.util import find_spec

from coterie.errors import ConfigError
from coterie.experts.kernels.base import Kernels


def resolve_backend(name: str) -> str:
    """``auto`` -> the fastest backend that is installed.

    Raises:
        ConfigError: an unknown backend, or one that is not installed.
    """
    has_numba = find_spec("numba") is not None
    if name == "auto":
        return "numba" if has_numba else "torch"
    if name not in ("numba", "torch"):
        raise ConfigError(f"--kernels must be auto, numba or torch, got {name!r}")
    if name == "numba" and not has_numba:
        raise ConfigError("--kernels numba needs the numba package; install it or use torch")
    return name


def select_kernels(name: str, device: str = "cpu") -> Kernels:
    """A new kernels object for one compute thread.

    Raises:
        ConfigError: no such backend for this device.
    """
    if device != "cpu":
        raise ConfigError(f"kernels exist for device 'cpu' only, got {device!r}")
    if resolve_backend(name) == "numba":
        from coterie.experts.kernels.numba_kernels import NumbaKernels

        return NumbaKernels()
    from coterie.experts.kernels.torch_kernels import TorchKernels

    return TorchKernels()
