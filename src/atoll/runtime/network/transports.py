"""Registry of transports by the name that multiaddrs give them."""

from __future__ import annotations

from atoll.runtime.network.tcp import TcpTransport
from atoll.runtime.network.transport import Transports

TRANSPORTS: Transports = {"tcp": TcpTransport}
