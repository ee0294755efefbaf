// An IPFS node (Helia: blocks and bitswap on TCP, noise, yamux) as a peer of tests, driven by lines of JSON on stdin as
// tests/kit/foreign_peer.py describes. It keeps its blocks in the current folder, and knows no peer but those that it is
// told to connect to and those that connect to it.
//
//   node peer.mjs [--port N]
//
//   {"cmd": "connect", "addr"}              {"event": "done"}
//   {"cmd": "put", "codec", "data": BASE64} {"event": "put", "cid"}
//   {"cmd": "fetch", "cid", "timeout_ms"}   {"event": "fetched", "cid", "size"}
//   {"cmd": "stop"}; the end of stdin means the same

import { createInterface } from 'node:readline'
import { parseArgs } from 'node:util'
import { bitswap } from '@helia/block-brokers'
import { Helia } from '@helia/utils'
import { identify } from '@libp2p/identify'
import { noise } from '@libp2p/noise'
import { tcp } from '@libp2p/tcp'
import { yamux } from '@libp2p/yamux'
import { multiaddr } from '@multiformats/multiaddr'
import { FsBlockstore } from 'blockstore-fs'
import { FsDatastore } from 'datastore-fs'
import { createLibp2p } from 'libp2p'
import { CID } from 'multiformats/cid'
import { sha256 } from 'multiformats/hashes/sha2'

const { values: options } = parseArgs({ options: { port: { type: 'string', default: '0' } } })
const blocks = new FsBlockstore('blocks')
const data = new FsDatastore('data')
await blocks.open()
await data.open()
const libp2p = await createLibp2p({
  start: false,
  addresses: { listen: [`/ip4/127.0.0.1/tcp/${options.port}`] },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  services: { identify: identify() }
})
let exchange
const helia = new Helia({
  libp2p,
  blockstore: blocks,
  datastore: data,
  blockBrokers: [(components) => { exchange = bitswap()(components); return exchange }],
  loadCodec: (code) => ({ code, name: `0x${code.toString(16)}`, encode: (bytes) => bytes, decode: () => null })
})
await helia.start()
process.on('unhandledRejection', (error) => console.error('left over:', error))

const commands = {
  async connect ({ addr }) {
    await libp2p.dial(multiaddr(addr))
    return { event: 'done' }
  },

  async put ({ codec, data }) {
    const bytes = Buffer.from(data, 'base64')
    const cid = CID.createV1(codec, await sha256.digest(bytes))
    await blocks.put(cid, bytes)
    await exchange.announce(cid) // peers who wait for it
    return { event: 'put', cid: cid.toString() }
  },

  async fetch ({ cid, timeout_ms: timeout }) {
    let size = 0
    for await (const part of helia.blockstore.get(CID.parse(cid), { signal: AbortSignal.timeout(timeout) })) {
      size += part.byteLength
    }
    return { event: 'fetched', cid, size }
  }
}

function tell (event) {
  process.stdout.write(JSON.stringify(event) + '\n')
}

async function execute (line) {
  const command = JSON.parse(line)
  if (command.cmd === 'stop') process.exit(0)
  try {
    tell({ ...await commands[command.cmd](command), id: command.id })
  } catch (error) {
    tell({ event: 'error', text: String(error.message ?? error), id: command.id })
  }
}

createInterface({ input: process.stdin }).on('line', execute).on('close', () => process.exit(0))
tell({ event: 'ready', peer: libp2p.peerId.toString(), addrs: libp2p.getMultiaddrs().map(String) })
