"""All engines of `--engine-address`, between the start and the stop of a router."""

import asyncio

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.rpc.channel import Channels
from router.config import RouterConfig
from router.engine_bridge.bridge import EngineBridge
from router.engine_bridge.link import FLAG, NotAnEngine


class EngineBridges:
    """Hold one bridge for each engine. The fleet watches them as workers, at `addresses`, through their channels."""

    def __init__(self, config: RouterConfig, channels: Channels) -> None:
        """Create the bridges; `channels` then lead to them at the engines' addresses."""
        self._bridges = [
            EngineBridge(
                address,
                config.model_folders(),
                period_s=config.report_period_ms / 1000,
                timeout_s=config.engine_timeout_s,
                shares_cache=config.engine_tenants == "share",
            )
            for address in config.engine_addresses()
        ]
        for bridge in self._bridges:
            channels.put(bridge.target, bridge.channel)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of the engines, host:port."""
        return tuple(bridge.target for bridge in self._bridges)

    async def start(self) -> None:
        """Begin to follow the engines. One that is not there yet is waited for; raises ConfigError for what is no engine, or has
        another model."""
        try:
            await asyncio.gather(*(bridge.link.probe() for bridge in self._bridges))
        except NotAnEngine as error:
            raise ConfigError(FLAG, str(error)) from error
        for bridge in self._bridges:
            bridge.link.start()

    async def stop(self) -> None:
        """Leave the engines; requests that still run there are aborted."""
        await asyncio.gather(*(bridge.link.stop() for bridge in self._bridges))
