//! A rust-libp2p gossipsub peer on 127.0.0.1, driven by lines of JSON on stdin and answering in lines of JSON on
//! stdout. The protocol is described in tests/kit/foreign_peer.py.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::env;
use std::error::Error;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use futures::{FutureExt as _, StreamExt as _};
use libp2p::swarm::dial_opts::DialOpts;
use libp2p::swarm::{ConnectionId, NetworkBehaviour, SwarmEvent};
use libp2p::{Multiaddr, PeerId, Swarm, SwarmBuilder, identify, identity, noise, tcp, yamux};
use libp2p_gossipsub as gossipsub;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

type Failure = Box<dyn Error>;

const MAX_DATA: usize = 4 * 1024 * 1024;
/// Messages published, or events handled, before anything else gets its turn.
const AT_ONCE: usize = 64;
/// Go drops what comes in a burst of more than 32: who fell behind the rate makes up for no more than this.
const CATCH_UP: f64 = 16.0;
/// How often the mesh is compared with what was told of it: the library has no event for it.
const MESH_EVERY: Duration = Duration::from_millis(50);

#[derive(NetworkBehaviour)]
struct Behaviour {
    gossipsub: gossipsub::Behaviour,
    identify: identify::Behaviour,
}

struct Options {
    strict: bool,
    port: u16,
    protocol: String,
    common_ids: bool,
    key: identity::Keypair,
}

fn options() -> Result<Options, Failure> {
    let mut found = Options {
        strict: true,
        port: 0,
        protocol: "1.3.0".into(),
        common_ids: true,
        key: identity::Keypair::generate_ed25519(),
    };
    let mut words = env::args().skip(1);
    while let Some(name) = words.next() {
        let value = words
            .next()
            .ok_or_else(|| format!("{name} wants a value"))?;
        match (name.as_str(), value.as_str()) {
            ("--signing", "strict" | "none") => found.strict = value == "strict",
            ("--port", _) => found.port = value.parse()?,
            ("--protocol", "1.3.0" | "1.1.0" | "1.0.0") => found.protocol = value, // the highest version offered
            ("--ids", "common" | "own") => found.common_ids = value == "common",
            ("--key", "ed25519") => {}
            ("--key", "secp256k1") => found.key = identity::Keypair::generate_secp256k1(),
            _ => return Err(format!("{name} {value}: not known here").into()),
        }
    }
    Ok(found)
}

/// Go's message id, author's bytes then seqno; the hash of the data where nobody signs. The library's own writes both
/// as text and is the same for all unsigned messages.
fn common_id(message: &gossipsub::Message) -> gossipsub::MessageId {
    match (&message.source, message.sequence_number) {
        (Some(source), Some(seqno)) => {
            let mut id = source.to_bytes();
            id.extend(seqno.to_be_bytes());
            id.into()
        }
        _ => Sha256::digest(&message.data).to_vec().into(),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn make_swarm(options: &Options) -> Result<Swarm<Behaviour>, Failure> {
    let mut config = gossipsub::ConfigBuilder::default();
    config
        .max_transmit_size(MAX_DATA)
        .heartbeat_initial_delay(Duration::from_millis(100));
    match options.protocol.as_str() {
        "1.1.0" => config.protocol_id_prefix("/meshsub"),
        "1.0.0" => config.protocol_id("/meshsub/1.0.0", gossipsub::Version::V1_0),
        _ => &mut config,
    };
    if options.common_ids || !options.strict {
        config.message_id_fn(common_id);
    }
    let authenticity = if options.strict {
        config.validation_mode(gossipsub::ValidationMode::Strict);
        gossipsub::MessageAuthenticity::Signed(options.key.clone())
    } else {
        config.validation_mode(gossipsub::ValidationMode::Anonymous);
        gossipsub::MessageAuthenticity::Anonymous
    };
    let behaviour = Behaviour {
        gossipsub: gossipsub::Behaviour::new(authenticity, config.build()?)?,
        identify: identify::Behaviour::new(identify::Config::new(
            "/kiln/test/1.0.0".into(),
            options.key.public(),
        )),
    };
    Ok(SwarmBuilder::with_existing_identity(options.key.clone())
        .with_tokio()
        .with_tcp(
            tcp::Config::default().nodelay(true),
            noise::Config::new,
            yamux::Config::default,
        )?
        .with_behaviour(|_| behaviour)?
        .with_swarm_config(|config| config.with_idle_connection_timeout(Duration::from_secs(3600)))
        .build())
}

/// A run of publications under way.
struct Publication {
    id: Value,
    topic: String,
    tag: String,
    /// `None`: payloads are made from tag and number.
    data: Option<Vec<u8>>,
    size: usize,
    rate: f64,
    count: u64,
    started: Instant,
    done: u64,
    sent: Vec<String>,
    failed: u64,
    text: Option<String>,
}

impl Publication {
    fn due(&self) -> Instant {
        if self.rate > 0.0 {
            self.started + Duration::from_secs_f64(self.done as f64 / self.rate)
        } else {
            self.started
        }
    }

    /// Moves the schedule where it is too far behind to catch up with.
    fn forgive(&mut self, now: Instant) {
        if self.rate > 0.0 {
            let behind = now.saturating_duration_since(self.due());
            self.started += behind.saturating_sub(Duration::from_secs_f64(CATCH_UP / self.rate));
        }
    }

    fn payload(&self) -> Vec<u8> {
        self.data.clone().unwrap_or_else(|| {
            let mut bytes = format!("{} {} ", self.tag, self.done).into_bytes();
            bytes.resize(self.size.max(bytes.len()), b'.');
            bytes
        })
    }
}

struct Peer {
    swarm: Swarm<Behaviour>,
    options: Options,
    /// Dials under way, with the ids of the commands that wait for them.
    dials: HashMap<ConnectionId, Value>,
    publications: Vec<Publication>,
    messages: Vec<Value>,
    subscribed: HashSet<String>,
    /// (topic, peer) pairs that were told as grafted.
    mesh: BTreeSet<(String, PeerId)>,
    ready: bool,
}

fn emit(event: &Value) {
    println!("{event}");
}

fn text<'a>(command: &'a Value, name: &str) -> Result<&'a str, Failure> {
    command[name]
        .as_str()
        .ok_or_else(|| format!("{} wants \"{name}\"", command["cmd"]).into())
}

impl Peer {
    /// The id of a message published here, in words: the library tells no seqno.
    fn text_id(&self, id: &gossipsub::MessageId) -> String {
        if !self.options.strict {
            return format!("sha256/{}", hex(&id.0));
        }
        let own = self.swarm.local_peer_id();
        if self.options.common_ids {
            format!("{own}/{}", hex(&id.0[id.0.len() - 8..]))
        } else {
            let seqno = String::from_utf8_lossy(&id.0[own.to_base58().len()..])
                .parse::<u64>()
                .unwrap_or_default();
            format!("{own}/{seqno:016x}")
        }
    }

    /// Obeys one command: the answer, where there is one at once.
    fn obey(&mut self, command: &Value) -> Result<Option<Value>, Failure> {
        let gossip = &mut self.swarm.behaviour_mut().gossipsub;
        match command["cmd"].as_str() {
            Some("connect") => {
                let dial = DialOpts::from(text(command, "addr")?.parse::<Multiaddr>()?);
                let connection = dial.connection_id();
                self.swarm.dial(dial)?;
                self.dials.insert(connection, command["id"].clone());
                return Ok(None);
            }
            Some("disconnect") => {
                let peer = text(command, "peer")?.parse()?;
                self.swarm
                    .disconnect_peer_id(peer)
                    .map_err(|()| "not connected")?;
            }
            Some("subscribe") => {
                let topic = text(command, "topic")?;
                gossip.subscribe(&gossipsub::IdentTopic::new(topic))?;
                self.subscribed.insert(topic.into());
            }
            Some("unsubscribe") => {
                let topic = text(command, "topic")?;
                gossip.unsubscribe(&gossipsub::IdentTopic::new(topic));
                self.subscribed.remove(topic);
            }
            Some(name @ ("publish" | "publish_raw")) => {
                let raw = name == "publish_raw";
                self.publications.push(Publication {
                    id: command["id"].clone(),
                    topic: text(command, "topic")?.into(),
                    tag: command["tag"].as_str().unwrap_or_default().into(),
                    data: if raw {
                        Some(BASE64.decode(text(command, "data")?)?)
                    } else {
                        None
                    },
                    size: usize::try_from(command["size"].as_u64().unwrap_or(0))?,
                    rate: command["rate"].as_f64().unwrap_or(0.0),
                    count: if raw {
                        1
                    } else {
                        command["count"].as_u64().ok_or("publish wants \"count\"")?
                    },
                    started: Instant::now(),
                    done: 0,
                    sent: Vec::new(),
                    failed: 0,
                    text: None,
                });
                return Ok(None);
            }
            Some("stop") => std::process::exit(0),
            _ => return Err(format!("no command {}", command["cmd"]).into()),
        }
        Ok(Some(json!({"event": "done"})))
    }

    fn obey_line(&mut self, line: &str) {
        let (id, outcome) = match serde_json::from_str::<Value>(line) {
            Ok(command) => (command["id"].clone(), self.obey(&command)),
            Err(error) => (Value::Null, Err(error.into())),
        };
        match outcome {
            Ok(None) => {}
            Ok(Some(mut answer)) => {
                answer["id"] = id;
                emit(&answer);
            }
            Err(error) => emit(&json!({"event": "error", "text": error.to_string(), "id": id})),
        }
    }

    fn publish_due(&mut self) {
        let now = Instant::now();
        for mut publication in std::mem::take(&mut self.publications) {
            publication.forgive(now);
            for _ in 0..AT_ONCE {
                if publication.done == publication.count || publication.due() > now {
                    break;
                }
                let topic = gossipsub::IdentTopic::new(&publication.topic);
                match self
                    .swarm
                    .behaviour_mut()
                    .gossipsub
                    .publish(topic, publication.payload())
                {
                    Ok(id) => publication.sent.push(self.text_id(&id)),
                    Err(error) => {
                        publication.failed += 1;
                        publication.text = Some(error.to_string());
                    }
                }
                publication.done += 1;
            }
            if publication.done < publication.count {
                self.publications.push(publication);
                continue;
            }
            let mut event = json!({
                "event": "published", "id": publication.id, "topic": publication.topic, "tag": publication.tag,
                "sent": publication.sent.len(), "failed": publication.failed, "ids": publication.sent,
            });
            if let Some(text) = publication.text {
                event["text"] = text.into();
            }
            emit(&event);
        }
    }

    fn handle(&mut self, event: SwarmEvent<BehaviourEvent>) {
        match event {
            SwarmEvent::NewListenAddr { address, .. } if !self.ready => {
                self.ready = true;
                let peer = self.swarm.local_peer_id();
                let address = format!("{address}/p2p/{peer}");
                emit(&json!({"event": "ready", "peer": peer.to_string(), "addrs": [address]}));
            }
            SwarmEvent::ListenerClosed { reason, .. } => {
                emit(
                    &json!({"event": "error", "text": format!("listener closed: {reason:?}"), "id": null}),
                );
            }
            SwarmEvent::ConnectionEstablished {
                peer_id,
                connection_id,
                num_established,
                ..
            } => {
                if num_established.get() == 1 {
                    emit(&json!({"event": "peer", "peer": peer_id.to_string(), "connected": true}));
                }
                if let Some(id) = self.dials.remove(&connection_id) {
                    emit(&json!({"event": "done", "id": id}));
                }
            }
            SwarmEvent::ConnectionClosed {
                peer_id,
                num_established: 0,
                ..
            } => {
                emit(&json!({"event": "peer", "peer": peer_id.to_string(), "connected": false}));
            }
            SwarmEvent::OutgoingConnectionError {
                connection_id,
                error,
                ..
            } => {
                if let Some(id) = self.dials.remove(&connection_id) {
                    emit(&json!({"event": "error", "text": error.to_string(), "id": id}));
                }
            }
            SwarmEvent::Behaviour(BehaviourEvent::Gossipsub(event)) => self.handle_gossip(event),
            _ => {}
        }
    }

    fn handle_gossip(&mut self, event: gossipsub::Event) {
        match event {
            gossipsub::Event::Message {
                propagation_source,
                message,
                ..
            } => self.messages.push(json!({
                "topic": message.topic.as_str(),
                "from": message.source.map(|peer| peer.to_string()),
                "seqno": message.sequence_number.map(|number| format!("{number:016x}")),
                "via": propagation_source.to_string(),
                "data": BASE64.encode(&message.data),
            })),
            gossipsub::Event::Subscribed { peer_id, topic } => {
                emit(
                    &json!({"event": "subscribed", "peer": peer_id.to_string(), "topic": topic.as_str()}),
                );
            }
            gossipsub::Event::Unsubscribed { peer_id, topic } => {
                emit(
                    &json!({"event": "unsubscribed", "peer": peer_id.to_string(), "topic": topic.as_str()}),
                );
            }
            _ => {}
        }
    }

    fn tell_mesh(&mut self) {
        let gossip = &self.swarm.behaviour().gossipsub;
        let mesh: BTreeSet<(String, PeerId)> = self
            .subscribed
            .iter()
            .flat_map(|topic| {
                let hash = gossipsub::TopicHash::from_raw(topic.as_str());
                let peers: Vec<_> = gossip
                    .mesh_peers(&hash)
                    .map(|peer| (topic.clone(), *peer))
                    .collect();
                peers
            })
            .collect();
        for (kind, changed) in [
            ("prune", self.mesh.difference(&mesh)),
            ("graft", mesh.difference(&self.mesh)),
        ] {
            for (topic, peer) in changed {
                emit(&json!({"event": kind, "peer": peer.to_string(), "topic": topic}));
            }
        }
        self.mesh = mesh;
    }

    async fn run(&mut self) -> Result<(), Failure> {
        let mut lines = BufReader::new(tokio::io::stdin()).lines();
        let mut mesh_tick = interval(MESH_EVERY);
        mesh_tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let due = self.publications.iter().map(Publication::due).min();
            tokio::select! {
                line = lines.next_line() => match line? {
                    Some(line) => self.obey_line(&line),
                    None => return Ok(()),
                },
                event = self.swarm.select_next_some() => self.handle(event),
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => self.publish_due(),
                _ = mesh_tick.tick() => self.tell_mesh(),
            }
            for _ in 0..AT_ONCE {
                match self.swarm.select_next_some().now_or_never() {
                    Some(event) => self.handle(event),
                    None => break,
                }
            }
            if !self.messages.is_empty() {
                emit(&json!({"event": "messages", "items": std::mem::take(&mut self.messages)}));
            }
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let options = options()?;
    let mut swarm = make_swarm(&options)?;
    swarm.listen_on(format!("/ip4/127.0.0.1/tcp/{}", options.port).parse()?)?;
    let mut peer = Peer {
        swarm,
        options,
        dials: HashMap::new(),
        publications: Vec::new(),
        messages: Vec::new(),
        subscribed: HashSet::new(),
        mesh: BTreeSet::new(),
        ready: false,
    };
    peer.run().await?;
    std::process::exit(0) // the thread that reads stdin would hold the runtime's end
}
