// What js-libp2p serves here, and how long it waits: left alone it hangs up, or says nothing, after 5 to 10 s of
// silence, which a busy computer needs now and then.

import { identify } from '@libp2p/identify'
import { ping } from '@libp2p/ping'

const timeout = 60_000

export const patient = {
  services: { identify: identify({ timeout }), ping: ping({ timeout }) },
  connectionMonitor: { enabled: false },
  connectionManager: {
    dialTimeout: timeout,
    addressDialTimeout: timeout,
    inboundUpgradeTimeout: timeout,
    inboundStreamProtocolNegotiationTimeout: timeout,
    outboundStreamProtocolNegotiationTimeout: timeout
  }
}
