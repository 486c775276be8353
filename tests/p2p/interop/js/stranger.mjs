// A js-libp2p node that knows nothing of us but libp2p's protocols, and does what it is told, a line of JSON each.
// stranger.mjs {"listen": [MULTIADDR, ...], "relay": bool}   prints {"peer", "addresses"}, then an answer per line read:
// {"do": "identify" | "ping" | "providers" | "send" | "swap" | "addresses", ...}; an error is {"error": its words}.
import { createHash, randomBytes } from 'node:crypto'
import { createInterface } from 'node:readline'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { circuitRelayServer, circuitRelayTransport } from '@libp2p/circuit-relay-v2'
import { identify } from '@libp2p/identify'
import { kadDHT, passthroughMapper } from '@libp2p/kad-dht'
import { ping } from '@libp2p/ping'
import { tcp } from '@libp2p/tcp'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'
import { CID } from 'multiformats/cid'
import { sha256 } from 'multiformats/hashes/sha2'
import { connectionManager, connectionMonitor, WAIT } from './patience.mjs'

const SWAP = '/test/swap'
const { listen = [], relay = false } = JSON.parse(process.argv[2] ?? '{}')

const services = {
  identify: identify({ timeout: WAIT, maxOutboundStreams: 8 }), // it begins one by itself when it has dialled
  ping: ping({ timeout: WAIT, maxOutboundStreams: 2 }), // its DHT pings whom it puts into its table; two at once are answered
  // addresses on loopback are what these tests have, and what the mapper that is the default would drop
  dht: kadDHT({ protocol: '/nolocod/kad/1.0.0', clientMode: true, peerInfoMapper: passthroughMapper })
}
if (relay) services.relay = circuitRelayServer()
const node = await createLibp2p({
  addresses: { listen },
  transports: [tcp(), circuitRelayTransport()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  connectionManager,
  connectionMonitor,
  connectionGater: { denyDialMultiaddr: () => false },
  services
})
const own = () => ({ peer: node.peerId.toString(), addresses: node.getMultiaddrs().map(String) })

async function all (stream) {
  const parts = []
  for await (const part of stream) parts.push(part instanceof Uint8Array ? part : part.subarray())
  return Buffer.concat(parts)
}

const hash = bytes => createHash('sha256').update(bytes).digest('hex')

// Sends `size` bytes and takes the peer's until it ends; both hashes.
async function swap (stream, size) {
  const content = randomBytes(size)
  const received = all(stream)
  for (let at = 0; at < size; at += 65536) {
    if (!stream.send(content.subarray(at, at + 65536))) await stream.onDrain()
  }
  await stream.close()
  return { sent: hash(content), received: hash(await received) }
}

const can = {
  addresses: own,
  async identify ({ address }) {
    const connection = await node.dial(multiaddr(address))
    const { agentVersion, protocols, listenAddrs, observedAddr } = await node.services.identify.identify(connection)
    return { agent: agentVersion, protocols, listen: listenAddrs.map(String), observed: String(observedAddr) }
  },
  async ping ({ address }) {
    return { milliseconds: await node.services.ping.ping(multiaddr(address)) }
  },
  // Of the run `run` (hex), as anybody finds them: by the CID of the sha2-256 of its id.
  async providers ({ address, run }) {
    await node.dial(multiaddr(address))
    const cid = CID.createV1(0x55, await sha256.digest(Buffer.from(run, 'hex')))
    const found = {}
    for (let again = 0; again < 50 && Object.keys(found).length === 0; again++) {
      try {
        for await (const { id, multiaddrs } of node.contentRouting.findProviders(cid)) found[id] = multiaddrs.map(String)
      } catch (error) { // it has not yet learned by identify that the peer is a server
        if (again === 49) throw error
      }
      await new Promise(resolve => setTimeout(resolve, 100))
    }
    return { found }
  },
  // Sends bytes (hex) on a protocol and tells how that ended.
  async send ({ address, protocol, bytes, close = true }) {
    const stream = await node.dialProtocol(multiaddr(address), protocol)
    stream.send(Buffer.from(bytes, 'hex'))
    if (close) await stream.close()
    try {
      return { ended: 'closed', answered: (await all(stream)).length }
    } catch (error) {
      return { ended: error.name }
    }
  },
  async swap ({ address, size }) {
    return await swap(await node.dialProtocol(multiaddr(address), SWAP, { runOnLimitedConnection: true }), size)
  }
}

await node.handle(SWAP, async stream => {
  const content = await all(stream)
  stream.send(Buffer.from(hash(content)))
  await stream.close()
}, { runOnLimitedConnection: true })
console.log(JSON.stringify(own()))
for await (const line of createInterface({ input: process.stdin })) {
  const order = JSON.parse(line)
  const late = new Promise((resolve, reject) => setTimeout(() => reject(new Error('late')), 2 * WAIT).unref())
  try {
    console.log(JSON.stringify(await Promise.race([can[order.do](order), late])))
  } catch (error) {
    console.log(JSON.stringify({ error: `${error.name}: ${error.message}` }))
  }
}
process.exit(0)
