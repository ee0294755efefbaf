// An IPFS node of one's own: Helia's block store, bitswap and pins over libp2p on TCP, driven by as much of Kubo's HTTP RPC
// as the bridge speaks, with Kubo's answers, so that one client serves both.
//
//   KILN_HELIA_TOKEN=… node server.mjs --folder DIR --listen MULTIADDR [--port N] [--keep SECONDS] [--collect SECONDS]
//
// It keeps blocks/, data/ (pins) and key in DIR, says {"rpc": its port} in one line of JSON once it is up, and ends when its
// standard input does: with whoever started it, however that one ended. It knows no peers but those it is told to connect to
// (swarm/connect) and those that come: no bootstrap, no DHT, no discovery, no routing over HTTP, nothing announced. The RPC is
// on 127.0.0.1, and answers those alone who send the token: "Authorization: Bearer TOKEN". The token is in the environment, which
// other users of the machine cannot read as they can read a command line.
//
//   --port     of the RPC; 0 (the default): any free one
//   --keep     a block put or pinned so lately is not collected, even if not pinned
//   --collect  how often blocks that are not pinned are collected

import { createHash, timingSafeEqual } from 'node:crypto'
import { createServer } from 'node:http'
import { mkdir, readFile, rename, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { format, parseArgs } from 'node:util'
import { bitswap } from '@helia/block-brokers'
import { Helia } from '@helia/utils'
import { generateKeyPair, privateKeyFromProtobuf, privateKeyToProtobuf } from '@libp2p/crypto/keys'
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

const AGENT = 'kiln-helia/2.5.2' // the number is @helia/utils's
const MAX_BLOCK = 2 << 20 // what bitswap carries
const MAX_BODY = MAX_BLOCK + (64 << 10) // and the frame of a form around it
const CODECS = { raw: 0x55, 'dag-pb': 0x70, 'dag-cbor': 0x71, 'dag-jose': 0x85, 'dag-json': 0x0129, cbor: 0x51, json: 0x0200 }
const LINGER = 600_000 // ms that a block is wanted after the last one who waited for it
const MOST_WANTS = 512 // half of what another Helia remembers of one peer
const TOO_BIG = 'produced block is over 2MiB: big blocks can\'t be exchanged with other peers'
const DURATION = /(\d+(?:\.\d+)?)(ms|s|m|h)/g
const UNITS = { ms: 1, s: 1_000, m: 60_000, h: 3_600_000 }

const { values: options } = parseArgs({
  options: {
    folder: { type: 'string' },
    listen: { type: 'string', multiple: true, default: [] },
    port: { type: 'string', default: '0' },
    keep: { type: 'string', default: '600' },
    collect: { type: 'string', default: '3600' }
  }
})

const TOKEN = process.env.KILN_HELIA_TOKEN
delete process.env.KILN_HELIA_TOKEN
if (!TOKEN) {
  complain('Error: KILN_HELIA_TOKEN is not set: without a token, any program on this machine could drive the node')
  process.exit(1)
}
const EXPECTED = digest(`Bearer ${TOKEN}`)

function digest (text) {
  return createHash('sha256').update(text).digest()
}

// What a peer said may be in an error, and somebody may look at the log in a terminal.
function complain (...what) {
  // eslint-disable-next-line no-control-regex
  const text = format(...what).replace(/[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]/g, '?')
  process.stderr.write(text + '\n')
}

// An answer other than success, as Kubo words it.
class Failure extends Error {
  constructor (message, status = 500, code = 0) {
    super(message)
    this.status = status
    this.code = code
  }
}

// ---------------------------------------------------------------- the node

process.on('unhandledRejection', (error) => complain('left over:', error)) // a peer's stream must not end the node
await mkdir(options.folder, { recursive: true, mode: 0o700 })
const blocks = new FsBlockstore(join(options.folder, 'blocks'))
const data = new FsDatastore(join(options.folder, 'data'))
await blocks.open()
await data.open()
const libp2p = await createLibp2p({
  start: false,
  privateKey: await loadKey(join(options.folder, 'key')),
  addresses: { listen: options.listen },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  services: { identify: identify({ agentVersion: AGENT }) },
  nodeInfo: { name: 'kiln-helia', version: '2.5.2', userAgent: AGENT }
})
let exchange
const helia = new Helia({
  libp2p,
  blockstore: blocks,
  datastore: data,
  blockBrokers: [(components) => { exchange = bitswap()(components); return exchange }],
  // Pins are of single blocks, so no links are read: a block that is not valid in its codec is kept all the same.
  codecs: Object.values(CODECS).map(opaque),
  loadCodec: opaque
})
const storage = helia.blockstore.unwrap() // without the lock that collecting takes: a want of 30 s would hold up every put
const late = new Map() // multihash -> when it was put or pinned last
const isPinned = helia.pins.isPinned.bind(helia.pins)
helia.pins.isPinned = async (cid, opts) => late.has(key(cid)) || isPinned(cid, opts)
await helia.start()

function opaque (code) {
  return { code, name: `0x${code.toString(16)}`, encode: (bytes) => bytes, decode: () => null }
}

function key (cid) {
  return Buffer.from(cid.multihash.bytes).toString('hex')
}

async function loadKey (path) {
  try {
    return privateKeyFromProtobuf(await readFile(path))
  } catch (error) {
    if (error.code !== 'ENOENT') throw error
  }
  const made = await generateKeyPair('Ed25519')
  await writeFile(`${path}.new`, privateKeyToProtobuf(made), { mode: 0o600 })
  await rename(`${path}.new`, path)
  return made
}

async function collect () {
  const oldest = Date.now() - Number(options.keep) * 1000
  for (const [name, at] of late) {
    if (at <= oldest) late.delete(name)
  }
  const gone = []
  await helia.gc({ onProgress: (event) => { if (event.type === 'helia:gc:deleted') gone.push(event.detail) } })
  return gone
}

// ---------------------------------------------------------------- wants

// Helia takes back a want for all who wait for the block as soon as one of them gives up, and does not tell its peers: one of
// them that gets the block later sends it, to be thrown away, and then (another Helia) does not send it again for a while. So
// there is one want for each block, and it outlives those who wait: what comes late is there for the next try.
const wants = new Map()

async function getBlock (cid, signal, offline) {
  if (offline || await blocks.has(cid)) {
    return read(cid, { signal, offline: true })
  }
  const name = key(cid)
  let want = wants.get(name)
  if (want == null) {
    const controller = new AbortController()
    want = { controller, waiting: 0, timer: undefined, block: read(cid, { signal: controller.signal }) }
    wants.set(name, want)
    want.block.catch(() => {}).finally(() => { // whoever waits hears of it
      clearTimeout(want.timer)
      if (wants.get(name) === want) wants.delete(name)
    })
    for (const [other, old] of wants) {
      if (wants.size <= MOST_WANTS) break
      if (old.waiting === 0 && old !== want) giveUp(other, old)
    }
  }
  clearTimeout(want.timer)
  want.waiting++
  try {
    return await unlessAborted(want.block, signal)
  } finally {
    want.waiting--
    if (want.waiting === 0 && wants.get(name) === want) {
      want.timer = setTimeout(giveUp, LINGER, name, want)
    }
  }
}

function giveUp (name, want) {
  clearTimeout(want.timer)
  wants.delete(name)
  want.controller.abort()
}

async function read (cid, opts) {
  const parts = []
  for await (const part of storage.get(cid, opts)) parts.push(part.subarray())
  return Buffer.concat(parts)
}

function unlessAborted (promise, signal) {
  return new Promise((resolve, reject) => {
    const aborted = () => reject(signal.reason)
    signal.addEventListener('abort', aborted, { once: true })
    if (signal.aborted) aborted()
    promise.then(resolve, reject).finally(() => signal.removeEventListener('abort', aborted))
  })
}

// ---------------------------------------------------------------- the RPC

const commands = {
  async id () {
    const addresses = libp2p.getMultiaddrs().map(String)
    return { ID: libp2p.peerId.toString(), Addresses: addresses, AgentVersion: AGENT, Protocols: libp2p.getProtocols() }
  },

  async 'block/put' (query, request) {
    const codec = CODECS[query.get('cid-codec') ?? 'raw']
    if (codec == null) throw new Failure(`unknown multicodec name: ${query.get('cid-codec')}`)
    const hash = query.get('mhtype') ?? 'sha2-256'
    if (hash !== 'sha2-256') throw new Failure(`hash function ${hash} is not to be had here; only sha2-256`)
    if (query.get('pin') === 'true') throw new Failure('pins with all they link to are not to be had here')
    const bytes = await formFile(request)
    if (bytes.length > MAX_BLOCK) throw new Failure(TOO_BIG)
    const cid = CID.createV1(codec, await sha256.digest(bytes))
    late.set(key(cid), Date.now())
    if (!await blocks.has(cid)) {
      await blocks.put(cid, bytes) // before peers who wait are told: they are sent what is in the store
      await exchange.announce(cid)
    }
    return { Key: cid.toString(), Size: bytes.length }
  },

  async 'block/get' (query, request, signal) {
    return getBlock(argument(query, 'cid'), signal, query.get('offline') === 'true')
  },

  async 'pin/add' (query, request, signal) {
    const cid = argument(query, 'ipfs-path')
    if (query.get('recursive') !== 'false') throw new Failure('pins with all they link to are not to be had here')
    await getBlock(cid, signal, false)
    late.set(key(cid), Date.now())
    try {
      for await (const each of helia.pins.add(cid, { depth: 0, signal })) void each
    } catch (error) {
      if (error.name !== 'AlreadyPinnedError') throw error
    }
    return { Pins: [cid.toString()] }
  },

  async 'pin/rm' (query, request, signal) {
    const cid = argument(query, 'ipfs-path')
    try {
      for await (const each of helia.pins.rm(cid, { signal })) void each
    } catch (error) {
      if (error.name === 'NotFoundError') throw new Failure('not pinned or pinned indirectly')
      throw error
    }
    return { Pins: [cid.toString()] }
  },

  async 'repo/gc' () {
    return Buffer.from((await collect()).map((cid) => JSON.stringify({ Key: { '/': cid.toString() } }) + '\n').join(''))
  },

  async 'swarm/connect' (query, request, signal) {
    const text = required(query, 'address')
    let addresses
    try {
      addresses = query.getAll('arg').map((each) => multiaddr(each))
    } catch {
      throw new Failure(`failed to parse multiaddr "${text}"`, 400, 1)
    }
    try {
      const connection = await libp2p.dial(addresses, { signal })
      return { Strings: [`connect ${connection.remotePeer} success`] }
    } catch (error) {
      throw new Failure(`connect ${text} failure: ${error.message}`)
    }
  },

  async 'swarm/disconnect' (query) {
    const peer = required(query, 'address').replace(/^\/p2p\//, '')
    const there = libp2p.getConnections().filter((each) => String(each.remotePeer) === peer)
    for (const each of there) each.abort(new Error('told to')) // closing waits for streams to end
    return { Strings: [`disconnect ${peer} ${there.length > 0 ? 'success' : 'failure: not connected'}`] }
  },

  async 'swarm/peers' () {
    return { Peers: libp2p.getConnections().map((each) => ({ Addr: String(each.remoteAddr), Peer: String(each.remotePeer) })) }
  }
}

function required (query, name) {
  const text = query.get('arg')
  if (!text) throw new Failure(`argument "${name}" is required`, 400, 1)
  return text
}

function argument (query, name) {
  const text = required(query, name)
  try {
    return CID.parse(text.replace(/^\/ipfs\//, ''))
  } catch (error) {
    throw new Failure(`invalid path "${text}": invalid CID: ${error.message}`)
  }
}

function milliseconds (text) {
  const parts = [...text.matchAll(DURATION)]
  if (parts.length === 0 || parts.map((part) => part[0]).join('') !== text) {
    throw new Failure(`time: invalid duration "${text}"`, 400, 1)
  }
  return parts.reduce((sum, [, number, unit]) => sum + Number(number) * UNITS[unit], 0)
}

async function formFile (request) {
  const parts = []
  let size = 0
  for await (const part of request) {
    size += part.length
    if (size > MAX_BODY) throw new Failure(TOO_BIG)
    parts.push(part)
  }
  let form
  try {
    form = await new Response(Buffer.concat(parts), { headers: { 'content-type': request.headers['content-type'] ?? '' } }).formData()
  } catch {
    throw new Failure('file argument \'data\' is required', 400, 1)
  }
  for (const [, value] of form) {
    if (typeof value !== 'string') return Buffer.from(await value.arrayBuffer())
  }
  throw new Failure('file argument \'data\' is required', 400, 1)
}

async function answer (request, response) {
  const url = new URL(request.url, 'http://127.0.0.1')
  const command = url.pathname.startsWith('/api/v0/') ? url.pathname.slice('/api/v0/'.length) : ''
  // As Kubo: a page in a browser must not drive the node.
  if (!timingSafeEqual(digest(request.headers.authorization ?? ''), EXPECTED)) {
    return plain(response, 403, 'Kubo RPC Access Denied: Please provide a valid authorization token')
  }
  if (request.headers.origin != null || request.headers.referer != null) return plain(response, 403, '403 - Forbidden')
  if (!Object.hasOwn(commands, command)) return plain(response, 404, '404 page not found')
  if (request.method !== 'POST') return plain(response, 405, '405 - Method Not Allowed', { allow: 'POST' })
  const controller = new AbortController()
  response.on('close', () => controller.abort())
  let timer
  try {
    const timeout = url.searchParams.get('timeout')
    if (timeout != null) timer = setTimeout(() => controller.abort(), milliseconds(timeout))
    const result = await commands[command](url.searchParams, request, controller.signal)
    if (Buffer.isBuffer(result)) {
      response.writeHead(200, { 'content-type': 'application/octet-stream', 'content-length': result.length }).end(result)
    } else {
      json(response, 200, result)
    }
  } catch (error) {
    const failure = controller.signal.aborted
      ? new Failure('context deadline exceeded')
      : error instanceof Failure ? error : new Failure(String(error.message ?? error))
    json(response, failure.status, { Message: failure.message, Code: failure.code, Type: 'error' })
  } finally {
    clearTimeout(timer)
    if (!request.complete) request.destroy() // a body larger than is read
  }
}

function json (response, status, value) {
  response.writeHead(status, { 'content-type': 'application/json' }).end(JSON.stringify(value) + '\n')
}

function plain (response, status, text, headers = {}) {
  response.writeHead(status, { 'content-type': 'text/plain', ...headers }).end(text + '\n')
}

// ---------------------------------------------------------------- from start to end

const server = createServer((request, response) => {
  answer(request, response).catch((error) => {
    complain(error)
    response.destroy()
  })
})
server.keepAliveTimeout = 600_000 // longer than a client's: none is closed while a request is on its way in
await new Promise((resolve, reject) => {
  server.once('error', reject)
  server.listen(Number(options.port), '127.0.0.1', resolve)
})
const timer = setInterval(() => { collect().catch((error) => complain('collecting failed:', error)) }, Number(options.collect) * 1000)

let ending = false
async function end () {
  if (ending) return
  ending = true
  setTimeout(() => process.exit(1), 3000).unref()
  clearInterval(timer)
  server.close()
  server.closeAllConnections()
  for (const [name, want] of wants) giveUp(name, want)
  await helia.stop()
  await data.close()
  process.exit(0)
}
process.on('SIGTERM', end)
process.on('SIGINT', end)
process.stdin.on('end', end).on('close', end).resume()

process.stdout.on('error', () => {}) // after this line nobody reads it
console.log(JSON.stringify({ rpc: server.address().port }))
