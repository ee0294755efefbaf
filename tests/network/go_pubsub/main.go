// A gossipsub peer of go-libp2p-pubsub on 127.0.0.1, driven by lines of JSON on stdin and answering in lines of JSON on
// stdout, as tests/kit/foreign_peer.py describes. Everything is go-libp2p-pubsub's default: signatures, message ids, and
// the sizes of RPCs that it accepts. -degree sets that of the mesh, -trace FILE keeps the library's own trace, and
// -bundle TOPIC,… agrees to topic tables with a bundle of these topics (topic_table.go).
//
//	{"cmd": "connect", "addr"}                      dials
//	{"cmd": "subscribe" | "unsubscribe", "topic"}
//	{"cmd": "publish_raw", "topic", "data": BASE64}
//	{"cmd": "publish", "topic", "count", "rate", "size", "tag"}
//
// -network waku makes it a node of Waku's relay (a protocol of its own, unsigned messages, ids that are the sha256 of the
// data), -network filecoin one of Filecoin (ids that are the blake2b-256 of the data). Either scores its peers:
//
//	{"cmd": "scores"}     answers with "lowest" and "now", each {PEER: SCORE}
package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p"
	pubsub "github.com/libp2p/go-libp2p-pubsub"
	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
)

const patience = 30 * time.Second

type command struct {
	Cmd   string          `json:"cmd"`
	ID    json.RawMessage `json:"id"`
	Addr  string          `json:"addr"`
	Topic string          `json:"topic"`
	Data  string          `json:"data"`
	Tag   string          `json:"tag"`
	Count int             `json:"count"`
	Rate  float64         `json:"rate"`
	Size  int             `json:"size"`
}

type answer map[string]any

var out struct {
	sync.Mutex
	*json.Encoder
}

func tell(what answer) {
	out.Lock()
	defer out.Unlock()
	if err := out.Encode(what); err != nil {
		os.Exit(1)
	}
}

type node struct {
	host   host.Host
	gossip *pubsub.PubSub
	topics map[string]*joined
	scores *scoreBoard
	scored bool
}

type joined struct {
	topic        *pubsub.Topic
	subscription *pubsub.Subscription
}

func (n *node) join(name string) (*joined, error) {
	if known := n.topics[name]; known != nil {
		return known, nil
	}
	topic, err := n.gossip.Join(name)
	if err != nil {
		return nil, err
	}
	if n.scored {
		if err := scoreTopic(topic); err != nil {
			return nil, err
		}
	}
	n.topics[name] = &joined{topic: topic}
	events, err := topic.EventHandler()
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			event, err := events.NextPeerEvent(context.Background())
			if err != nil {
				return
			}
			kind := "subscribed"
			if event.Type == pubsub.PeerLeave {
				kind = "unsubscribed"
			}
			tell(answer{"event": kind, "peer": event.Peer.String(), "topic": name})
		}
	}()
	return n.topics[name], nil
}

func (n *node) subscribe(name string) error {
	on, err := n.join(name)
	if err != nil || on.subscription != nil {
		return err
	}
	on.subscription, err = on.topic.Subscribe(pubsub.WithBufferSize(4096))
	if err != nil {
		return err
	}
	go func(subscription *pubsub.Subscription) {
		for {
			message, err := subscription.Next(context.Background())
			if err != nil {
				return
			}
			tell(answer{"event": "messages", "items": []answer{{
				"topic": name,
				"from":  message.GetFrom().String(),
				"seqno": hex.EncodeToString(message.GetSeqno()),
				"data":  base64.StdEncoding.EncodeToString(message.GetData()),
				"via":   message.ReceivedFrom.String(),
			}}})
		}
	}(on.subscription)
	return nil
}

func (n *node) obey(c command) (answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	done := answer{"event": "done"}
	switch c.Cmd {
	case "connect":
		other, err := peer.AddrInfoFromString(c.Addr)
		if err != nil {
			return nil, err
		}
		return done, n.host.Connect(ctx, *other)
	case "subscribe":
		return done, n.subscribe(c.Topic)
	case "unsubscribe":
		if on := n.topics[c.Topic]; on != nil && on.subscription != nil {
			on.subscription.Cancel()
			on.subscription = nil
		}
		return done, nil
	case "publish_raw":
		data, err := base64.StdEncoding.DecodeString(c.Data)
		if err != nil {
			return nil, err
		}
		on, err := n.join(c.Topic)
		if err != nil {
			return nil, err
		}
		return answer{"event": "published", "topic": c.Topic, "sent": 1, "failed": 0}, on.topic.Publish(ctx, data)
	case "publish":
		on, err := n.join(c.Topic)
		if err == nil {
			go n.publishMany(c.ID, on, c)
		}
		return nil, err
	case "scores":
		return n.scores.tell(), nil
	}
	return nil, fmt.Errorf("no command %q", c.Cmd)
}

func run() error {
	port := flag.Int("port", 0, "to listen on")
	trace := flag.String("trace", "", "file for go-libp2p-pubsub's own JSON trace")
	bundle := flag.String("bundle", "", "topics, separated by commas, that go by index")
	kind := flag.String("network", "", "waku or filecoin: behaves as a node of this network")
	degree := flag.Int("degree", 0, "of the mesh; with a few peers, IHAVE goes to those outside a small mesh only")
	flag.Parse()
	out.Encoder = json.NewEncoder(os.Stdout)
	own, err := libp2p.New(
		libp2p.ListenAddrStrings(fmt.Sprintf("/ip4/127.0.0.1/tcp/%d", *port)),
		libp2p.DisableRelay(),
		libp2p.UserAgent("go-pubsub/1"),
	)
	if err != nil {
		return err
	}
	options := []pubsub.Option{}
	if *trace != "" {
		tracer, err := pubsub.NewJSONTracer(*trace)
		if err != nil {
			return err
		}
		options = append(options, pubsub.WithEventTracer(tracer))
	}
	if *degree > 0 {
		params := pubsub.DefaultGossipSubParams()
		params.D, params.Dlo, params.Dhi, params.Dscore, params.Dout = *degree, *degree, *degree, *degree, 0
		options = append(options, pubsub.WithGossipSubParams(params))
	}
	scores := &scoreBoard{lowest: map[string]float64{}}
	special, err := networkOptions(*kind, scores)
	if err != nil {
		return err
	}
	options = append(options, special...)
	wire := host.Host(own)
	if *bundle != "" {
		wire = withTopicTable(own, strings.Split(*bundle, ","))
	}
	gossip, err := pubsub.NewGossipSub(context.Background(), wire, options...)
	if err != nil {
		return err
	}
	own.Network().Notify(&network.NotifyBundle{
		ConnectedF: func(_ network.Network, conn network.Conn) {
			tell(answer{"event": "peer", "peer": conn.RemotePeer().String(), "connected": true})
		},
		DisconnectedF: func(of network.Network, conn network.Conn) {
			if of.Connectedness(conn.RemotePeer()) != network.Connected {
				tell(answer{"event": "peer", "peer": conn.RemotePeer().String(), "connected": false})
			}
		},
	})
	addrs := []string{}
	for _, addr := range own.Addrs() {
		addrs = append(addrs, fmt.Sprintf("%s/p2p/%s", addr, own.ID()))
	}
	tell(answer{"event": "ready", "peer": own.ID().String(), "addrs": addrs})
	n := &node{own, gossip, map[string]*joined{}, scores, *kind != ""}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 8<<20)
	for lines.Scan() {
		var c command
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			return err
		}
		if c.Cmd == "stop" {
			break
		}
		said, err := n.obey(c)
		if err != nil {
			said = answer{"event": "error", "text": err.Error()}
		}
		if said != nil { // else the answer comes later
			said["id"] = c.ID
			tell(said)
		}
	}
	return errors.Join(lines.Err(), own.Close())
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
