// A node of the BitTorrent DHT (npm bittorrent-dht) on 127.0.0.1, driven by lines of JSON. Bytes are in hex.
//
//   node peer.mjs [port of another node ...]     with none it knows nobody; no public router is ever asked
//
//   {"event": "listening", "port"}               said at the start
//   {"cmd": "nodes"}                              -> {"count"}: how many nodes it knows
//   {"cmd": "put", "seed", "salt", "seq", "v"}    -> {"stored", "error"}; v is bencoded; seed: of the ed25519 key
//   {"cmd": "get", "target", "salt"}              -> {"item": {"k", "seq", "sig", "v"} or null, "error"}

import { createPrivateKey, createPublicKey, sign, verify } from 'node:crypto'
import { createInterface } from 'node:readline'
import bencode from 'bencode'
import DHT from 'bittorrent-dht'

// What DER puts before the 32 bytes of an ed25519 key (RFC 8410).
const PRIVATE = Buffer.from('302e020100300506032b657004220420', 'hex')
const PUBLIC = Buffer.from('302a300506032b6570032100', 'hex')

const hex = (text) => Buffer.from(text, 'hex')
const say = (event) => process.stdout.write(`${JSON.stringify(event)}\n`)
const publicKey = (raw) => createPublicKey({ key: Buffer.concat([PUBLIC, raw]), format: 'der', type: 'spki' })

const others = process.argv.slice(2).map((port) => `127.0.0.1:${port}`)
const dht = new DHT({
  bootstrap: others.length > 0 ? others : false,
  verify: (signature, message, key) => verify(null, message, publicKey(Buffer.from(key)), signature)
})

const commands = {
  nodes: (_, done) => done({ count: dht.toJSON().nodes.length }),
  put: ({ seed, salt, seq, v }, done) => {
    const secret = createPrivateKey({ key: Buffer.concat([PRIVATE, hex(seed)]), format: 'der', type: 'pkcs8' })
    const raw = createPublicKey(secret).export({ format: 'der', type: 'spki' }).subarray(PUBLIC.length)
    const item = { k: raw, salt: hex(salt), seq, v: bencode.decode(hex(v)), sign: (message) => sign(null, message, secret) }
    dht.put(item, (error, _, stored) => done({ stored: stored ?? 0, error: error?.message ?? null }))
  },
  get: ({ target, salt }, done) => {
    dht.get(hex(target), { salt: hex(salt), cache: false }, (error, found) => {
      const text = (bytes) => Buffer.from(bytes).toString('hex')
      const item = found && { k: text(found.k), seq: found.seq, sig: text(found.sig), v: text(bencode.encode(found.v)) }
      done({ item: item ?? null, error: error?.message ?? null })
    })
  }
}

dht.on('error', (error) => { throw error })
dht.listen(0, '127.0.0.1', () => say({ event: 'listening', port: dht.address().port }))
createInterface({ input: process.stdin })
  .on('line', (line) => { const order = JSON.parse(line); commands[order.cmd](order, say) })
  .on('close', () => process.exit(0))
