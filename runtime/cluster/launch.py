"""Which launcher a configuration asks for."""

from coterie.errors import ConfigError
from coterie.runtime.cluster.launcher import Launcher
from coterie.runtime.cluster.process_launcher import ProcessLauncher
from coterie.runtime.cluster.ray_launcher import RayLauncher
from coterie.runtime.config import EngineConfig


def make_launcher(config: EngineConfig) -> Launcher:
    """Raises ConfigError when the flags contradict each other."""
    parallel = config.parallel
    if parallel.distributed_executor_backend == "mp":
        if parallel.ray_address is not None:
            raise ConfigError("--ray-address needs --distributed-executor-backend ray")
        return ProcessLauncher()
    return RayLauncher(parallel.ray_address, config.timeouts.orphan_grace_s)
