"""Registry of transports by `DialAddress.transport`, the protocols of an address."""

from __future__ import annotations

from atoll.runtime.network.tcp import TcpTransport
from atoll.runtime.network.transport import Transports

TRANSPORTS: Transports = {"tcp": TcpTransport}
