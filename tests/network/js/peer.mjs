// A js-libp2p gossipsub peer on 127.0.0.1, driven by lines of JSON on stdin and answering in lines of JSON on stdout.
// The protocol is described in tests/kit/foreign_peer.py.

import { createHash } from 'node:crypto'
import { appendFileSync } from 'node:fs'
import { createInterface } from 'node:readline'
import { setTimeout as sleep } from 'node:timers/promises'
import { parseArgs } from 'node:util'
import { generateKeyPair } from '@libp2p/crypto/keys'
import { gossipsub, StrictNoSign, StrictSign } from '@libp2p/gossipsub'
import { identify } from '@libp2p/identify'
import { noise } from '@libp2p/noise'
import { tcp } from '@libp2p/tcp'
import { yamux } from '@libp2p/yamux'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'

const LADDER = ['1.2.0', '1.1.0', '1.0.0']
const MAX_DATA = 4 * 1024 * 1024
// Go drops what comes in a burst of more than 32: who fell behind the rate makes up for no more than this
const CATCH_UP = 16

const { values: options } = parseArgs({
  options: {
    signing: { type: 'string', default: 'strict' }, // strict | none
    port: { type: 'string', default: '0' },
    protocol: { type: 'string', default: LADDER[0] }, // the highest version offered
    ids: { type: 'string', default: 'common' }, // common | own
    key: { type: 'string', default: 'ed25519' }, // ed25519 | secp256k1 | rsa
    degree: { type: 'string', default: '0' }, // of the mesh; 0: the library's own
    trace: { type: 'string', default: '' } // a file for the RPCs, in the JSON of go-libp2p-pubsub's own tracer
  }
})

function refuse (text) {
  process.stderr.write(`${text}\n`)
  process.exit(2)
}

const strict = options.signing === 'strict'
if (!strict && options.signing !== 'none') refuse(`--signing ${options.signing}: strict or none`)
if (!LADDER.includes(options.protocol)) refuse(`--protocol ${options.protocol}: one of ${LADDER.join(', ')}`)
if (!['common', 'own'].includes(options.ids)) refuse(`--ids ${options.ids}: common or own`)
const KEYS = { ed25519: ['Ed25519'], secp256k1: ['secp256k1'], rsa: ['RSA', 2048] }
if (!(options.key in KEYS)) refuse(`--key ${options.key}: one of ${Object.keys(KEYS).join(', ')}`)

function emit (event) {
  process.stdout.write(`${JSON.stringify(event)}\n`)
}

const seqnoHex = (number) => number.toString(16).padStart(16, '0')

function textId (message) {
  return message.type === 'signed'
    ? `${message.from}/${seqnoHex(message.sequenceNumber)}`
    : `sha256/${createHash('sha256').update(message.data).digest('hex')}`
}

// Go's message id, author's bytes then seqno. This library's own puts the author's public key in place of its
// peer id, which no other implementation knows in an IHAVE.
function commonId (message) {
  return message.type === 'signed'
    ? Buffer.concat([message.from.toMultihash().bytes, Buffer.from(seqnoHex(message.sequenceNumber), 'hex')])
    : createHash('sha256').update(message.data).digest()
}

const degree = Number(options.degree)

function service (components) {
  const made = gossipsub({
    globalSignaturePolicy: strict ? StrictSign : StrictNoSign,
    fallbackToFloodsub: false,
    maxInboundDataLength: MAX_DATA,
    ...(degree > 0 ? { D: degree, Dlo: degree, Dhi: degree, Dscore: degree, Dout: 0 } : {}),
    ...(options.ids === 'common' ? { msgIdFn: commonId } : {})
  })(components)
  made.protocols = LADDER.slice(LADDER.indexOf(options.protocol)).map((version) => `/meshsub/${version}`)
  // publish() does not tell the seqno it chose: the message it builds is seen where its id is asked for
  const id = made.msgIdFn
  made.msgIdFn = (message) => {
    if (sending.has(message.data)) sending.set(message.data, textId(message))
    return id(message)
  }
  if (options.trace !== '') trace(made)
  return made
}
const sending = new WeakMap() // data -> id in text

const base64 = (bytes) => Buffer.from(bytes).toString('base64')

// What the library has of an RPC once it was decoded, or when it was encoded.
function note (name, side, peer, rpc) {
  const control = {}
  for (const kind of ['ihave', 'iwant', 'graft', 'prune', 'idontwant']) {
    const entries = rpc.control?.[kind] ?? []
    if (entries.length === 0) continue
    control[kind] = entries.map(({ topicID, messageIDs }) => ({ topic: topicID, messageIDs: messageIDs?.map(base64) }))
  }
  const meta = { subscription: rpc.subscriptions ?? [], control }
  const line = { timestamp: Date.now() * 1e6, [name]: { [side]: base64(peer.toMultihash().bytes), meta } }
  appendFileSync(options.trace, `${JSON.stringify(line)}\n`)
}

function trace (pubsub) {
  const { handleReceivedRpc, sendRpc, sendRpcInBatch } = pubsub
  const sent = (id, rpc) => {
    note('sendRPC', 'sendTo', node.getPeers().find((peer) => peer.toString() === id), rpc)
  }
  pubsub.handleReceivedRpc = function (from, rpc) {
    note('recvRPC', 'receivedFrom', from, rpc)
    return handleReceivedRpc.call(this, from, rpc)
  }
  pubsub.sendRpc = function (id, rpc) {
    const wasSent = sendRpc.call(this, id, rpc)
    if (wasSent) sent(id, rpc)
    return wasSent
  }
  pubsub.sendRpcInBatch = function (ids, rpc) {
    sendRpcInBatch.call(this, ids, rpc) // takes those out that it could not send to
    for (const id of ids) sent(id, rpc)
  }
}

const node = await createLibp2p({
  privateKey: await generateKeyPair(...KEYS[options.key]),
  addresses: { listen: [`/ip4/127.0.0.1/tcp/${options.port}`] },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  connectionGater: { denyDialMultiaddr: () => false }, // loopback is what is dialled here
  services: { identify: identify(), pubsub: service }
})
const pubsub = node.services.pubsub

let items = []
function flush () {
  emit({ event: 'messages', items })
  items = []
}
pubsub.addEventListener('gossipsub:message', ({ detail: { propagationSource, msg } }) => {
  if (items.length === 0) setImmediate(flush)
  items.push({
    topic: msg.topic,
    from: msg.type === 'signed' ? msg.from.toString() : null,
    seqno: msg.type === 'signed' ? seqnoHex(msg.sequenceNumber) : null,
    via: propagationSource.toString(),
    data: Buffer.from(msg.data).toString('base64')
  })
})
pubsub.addEventListener('subscription-change', ({ detail: { peerId, subscriptions } }) => {
  for (const { topic, subscribe } of subscriptions) {
    emit({ event: subscribe ? 'subscribed' : 'unsubscribed', peer: peerId.toString(), topic })
  }
})
for (const kind of ['graft', 'prune']) {
  pubsub.addEventListener(`gossipsub:${kind}`, ({ detail: { peerId, topic } }) => {
    emit({ event: kind, peer: peerId, topic })
  })
}
node.addEventListener('peer:connect', ({ detail }) => emit({ event: 'peer', peer: detail.toString(), connected: true }))
node.addEventListener('peer:disconnect', ({ detail }) => emit({ event: 'peer', peer: detail.toString(), connected: false }))

async function publishOne (topic, data, outcome) {
  try {
    sending.set(data, null)
    const { recipients } = await pubsub.publish(topic, data)
    if (recipients.length === 0) throw new Error('no peer took it')
    outcome.ids.push(sending.get(data))
    outcome.sent += 1
  } catch (error) {
    outcome.failed += 1
    outcome.text = String(error.message ?? error)
  }
}

function payload (tag, number, size) {
  return Buffer.from(`${tag} ${number} `.padEnd(size, '.'))
}

const commands = {
  async connect ({ addr }) {
    await node.dial(multiaddr(addr))
  },
  async disconnect ({ peer }) {
    const found = node.getConnections().filter((connection) => connection.remotePeer.toString() === peer)
    await Promise.all(found.map((connection) => connection.close()))
  },
  async subscribe ({ topic }) {
    pubsub.subscribe(topic)
  },
  async unsubscribe ({ topic }) {
    pubsub.unsubscribe(topic)
  },
  async publish ({ topic, count, rate = 0, size = 0, tag = '' }) {
    const outcome = { sent: 0, failed: 0, ids: [] }
    const pause = rate > 0 ? 1000 / rate : 0
    let due = performance.now()
    for (let number = 0; number < count; number++, due += pause) {
      const now = performance.now()
      due = Math.max(due, now - CATCH_UP * pause)
      if (due > now) await sleep(due - now)
      await publishOne(topic, payload(tag, number, size), outcome)
    }
    return { event: 'published', topic, tag, ...outcome }
  },
  async publish_raw ({ topic, data }) {
    const outcome = { sent: 0, failed: 0, ids: [] }
    await publishOne(topic, Buffer.from(data, 'base64'), outcome)
    return { event: 'published', topic, ...outcome }
  },
  async stop () {
    await node.stop()
    process.exit(0)
  }
}

async function obey (line) {
  let id = null
  try {
    const command = JSON.parse(line)
    id = command.id ?? null
    if (!Object.hasOwn(commands, command.cmd)) throw new Error(`no command ${command.cmd}`)
    const answer = await commands[command.cmd](command)
    emit({ ...(answer ?? { event: 'done' }), id })
  } catch (error) {
    emit({ event: 'error', text: String(error.message ?? error), id })
  }
}

createInterface({ input: process.stdin })
  .on('line', obey)
  .on('close', commands.stop)

emit({ event: 'ready', peer: node.peerId.toString(), addrs: node.getMultiaddrs().map(String) })
