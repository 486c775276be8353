// A js-libp2p node that swaps SIZE bytes with another node, and prints the hashes of what it sent and received.
// peer.mjs listen            prints its address, answers one stream
// peer.mjs dial MULTIADDR    opens one
import { createHash, randomBytes } from 'node:crypto'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { tcp } from '@libp2p/tcp'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'
import { connectionManager, connectionMonitor } from './patience.mjs'

const PROTOCOL = '/test/swap'
const SIZE = 64 << 20
const PIECE = 1 << 18
const [command, address] = process.argv.slice(2)

async function send (stream) {
  const hash = createHash('sha256')
  for (let sent = 0; sent < SIZE; sent += PIECE) {
    const piece = randomBytes(PIECE)
    hash.update(piece)
    if (!stream.send(piece)) await stream.onDrain()
  }
  await stream.close()
  return hash.digest('hex')
}

async function receive (stream) {
  const hash = createHash('sha256')
  let received = 0
  for await (const part of stream) {
    const bytes = part instanceof Uint8Array ? part : part.subarray()
    hash.update(bytes)
    received += bytes.byteLength
  }
  if (received !== SIZE) throw new Error(`${received} bytes instead of ${SIZE}`)
  return hash.digest('hex')
}

async function swap (stream) {
  const [sent, received] = await Promise.all([send(stream), receive(stream)])
  console.log(JSON.stringify({ sent, received }))
}

const node = await createLibp2p({
  addresses: { listen: command === 'listen' ? ['/ip4/127.0.0.1/tcp/0'] : [] },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  connectionManager,
  connectionMonitor
})
if (command === 'listen') {
  await node.handle(PROTOCOL, swap)
  console.log(node.getMultiaddrs()[0].toString())
} else {
  await swap(await node.dialProtocol(multiaddr(address), PROTOCOL))
}
process.stdin.resume()
process.stdin.on('end', () => process.exit(0))
