// js-libp2p as the other end of test_js_libp2p.py. One JSON object per line on stdout; lives until stdin ends.
//
//   node peer.mjs listen           serves identify, ping and /echo/1, and says whom it identified
//   node peer.mjs dial <address>   identifies, pings and echoes 16 MB through whoever listens there, then ends
//
// EARLY_MUXERS=no: announce no multiplexer inside Noise, so that multistream-select must agree on one.

import { createHash, randomBytes } from 'node:crypto'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { tcp } from '@libp2p/tcp'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'
import { patient } from './patient.mjs'

const ECHO = '/echo/1'
const ECHO_BYTES = 16 * 1024 * 1024
const [mode, address] = process.argv.slice(2)
const say = (what) => process.stdout.write(JSON.stringify(what) + '\n')
const sha256 = (pieces) => pieces.reduce((hash, piece) => hash.update(piece), createHash('sha256')).digest('hex')

const node = await createLibp2p({
  addresses: { listen: mode === 'listen' ? ['/ip4/127.0.0.1/tcp/0'] : [] },
  transports: [tcp()],
  connectionEncrypters: [noise(process.env.EARLY_MUXERS === 'no' ? { extensions: { streamMuxers: [] } } : {})],
  streamMuxers: [yamux()],
  ...patient
})

const whatIdentifySays = ({ peerId, agentVersion, protocols, listenAddrs, observedAddr }) => ({
  peer: peerId.toString(),
  agent: agentVersion,
  protocols,
  listens: listenAddrs.map(String),
  observed: String(observedAddr)
})

async function sendAll (stream, piece) {
  if (!stream.send(piece)) await stream.onDrain()
}

await node.handle(ECHO, async (stream) => {
  for await (const piece of stream) await sendAll(stream, piece.subarray())
  await stream.close()
})

if (mode === 'listen') {
  node.addEventListener('peer:identify', ({ detail }) => say({ identified: whatIdentifySays(detail) }))
  say({ listening: node.getMultiaddrs().map(String), peer: node.peerId.toString() })
  process.stdin.resume().on('end', async () => { await node.stop(); process.exit(0) })
} else {
  const identified = Promise.withResolvers()
  node.addEventListener('peer:identify', ({ detail }) => identified.resolve(whatIdentifySays(detail)))
  const connection = await node.dial(multiaddr(address))
  const who = await identified.promise
  const rtts = [await node.services.ping.ping(connection.remotePeer), await node.services.ping.ping(connection.remotePeer)]

  const question = Array.from({ length: ECHO_BYTES / 65536 }, () => randomBytes(65536))
  const stream = await connection.newStream(ECHO)
  const asking = (async () => {
    for (const piece of question) await sendAll(stream, piece)
    await stream.close()
  })()
  const answer = []
  let bytes = 0
  for await (const piece of stream) {
    answer.push(piece.subarray())
    bytes += piece.byteLength
  }
  await asking
  let refused = ''
  await connection.newStream('/chess/1').catch((why) => { refused = why.name })
  say({ peer: node.peerId.toString(), identified: who, rtts, bytes, same: sha256(question) === sha256(answer), refused })
  await node.stop()
  process.exit(0)
}
