// A node of go-libp2p's Kademlia DHT on 127.0.0.1, driven by lines of JSON on stdin and answering in lines of JSON on
// stdout, as tests/kit/foreign_peer.py describes. It speaks no pubsub.
//
//	{"cmd": "connect", "addr"}       dials, and waits until the other is in the routing table if it serves the DHT
//	{"cmd": "provide", "topic"}      announces itself under the topic's key, as go's routing discovery does
//	{"cmd": "providers", "topic"}    who is announced there: {"event": "providers", "items": [{"peer", "addrs"}]}
//
// --mode server | client; --prefix, in place of /ipfs.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/ipfs/go-cid"
	"github.com/libp2p/go-libp2p"
	dht "github.com/libp2p/go-libp2p-kad-dht"
	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/protocol"
	"github.com/multiformats/go-multihash"
)

const patience = 30 * time.Second

type command struct {
	Cmd   string          `json:"cmd"`
	ID    json.RawMessage `json:"id"`
	Addr  string          `json:"addr"`
	Topic string          `json:"topic"`
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

func key(topic string) (cid.Cid, error) {
	hash, err := multihash.Sum([]byte(topic), multihash.SHA2_256, -1)
	return cid.NewCidV1(cid.Raw, hash), err
}

type node struct {
	host host.Host
	dht  *dht.IpfsDHT
}

func (n *node) connect(ctx context.Context, addr string) error {
	other, err := peer.AddrInfoFromString(addr)
	if err != nil {
		return err
	}
	if err := n.host.Connect(ctx, *other); err != nil {
		return err
	}
	supported, err := n.host.Peerstore().SupportsProtocols(other.ID, n.serves())
	if err != nil || len(supported) == 0 {
		return err
	}
	for n.dht.RoutingTable().Find(other.ID) == "" {
		select {
		case <-ctx.Done():
			return errors.New("connected, but not in the routing table")
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}

var served protocol.ID

func (n *node) serves() protocol.ID { return served }

func (n *node) obey(c command) (answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	switch c.Cmd {
	case "connect":
		return answer{"event": "done"}, n.connect(ctx, c.Addr)
	case "provide":
		id, err := key(c.Topic)
		if err != nil {
			return nil, err
		}
		return answer{"event": "done"}, n.dht.Provide(ctx, id, true)
	case "providers":
		id, err := key(c.Topic)
		if err != nil {
			return nil, err
		}
		found, err := n.dht.FindProviders(ctx, id)
		items := []answer{}
		for _, each := range found {
			addrs := []string{}
			for _, addr := range each.Addrs {
				addrs = append(addrs, addr.String())
			}
			items = append(items, answer{"peer": each.ID.String(), "addrs": addrs})
		}
		return answer{"event": "providers", "items": items}, err
	}
	return nil, fmt.Errorf("no command %q", c.Cmd)
}

func run() error {
	port := flag.Int("port", 0, "to listen on")
	mode := flag.String("mode", "server", "server or client")
	prefix := flag.String("prefix", "/ipfs", "of the protocol")
	flag.Parse()
	out.Encoder = json.NewEncoder(os.Stdout)
	served = protocol.ID(*prefix + "/kad/1.0.0")
	own, err := libp2p.New(
		libp2p.ListenAddrStrings(fmt.Sprintf("/ip4/127.0.0.1/tcp/%d", *port)),
		libp2p.DisableRelay(),
		libp2p.UserAgent("go-kad/1"),
	)
	if err != nil {
		return err
	}
	how := dht.ModeServer
	if *mode == "client" {
		how = dht.ModeClient
	}
	options := []dht.Option{dht.Mode(how), dht.ProtocolPrefix(protocol.ID(*prefix))}
	table, err := dht.New(context.Background(), own, options...)
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
	n := &node{own, table}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var c command
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			return err
		}
		if c.Cmd == "stop" {
			break
		}
		go func() {
			said, err := n.obey(c)
			if err != nil {
				said = answer{"event": "error", "text": err.Error()}
			}
			said["id"] = c.ID
			tell(said)
		}()
	}
	return errors.Join(lines.Err(), table.Close(), own.Close())
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
