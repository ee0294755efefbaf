// Topic tables (the draft of gossipsub's Topic Table Extension, section "Protocol") for a go-libp2p-pubsub that has
// none: a host whose streams replace topics by their indices on the wire. So the library and its tracer see names.
// One bundle; a peer that agrees to it gets indices from its hello on.
package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"io"
	"sort"
	"strings"
	"sync"

	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/protocol"
	"google.golang.org/protobuf/encoding/protowire"
)

const (
	extensions = 6       // of the control message
	table      = 4820938 // of the extensions
)

// Numbers of the fields of a message: its topic, and the index in its place.
type form struct{ name, index protowire.Number }

var (
	message = form{4, 7}
	control = map[protowire.Number]form{1: {1, 3}, 3: {1, 2}, 4: {1, 4}} // IHAVE, GRAFT, PRUNE
)

type tabled struct {
	host.Host
	topics []string // in the order of the table
	hash   []byte
	lock   sync.Mutex
	agreed map[string]bool // by connection
}

func withTopicTable(own host.Host, topics []string) host.Host {
	sort.Strings(topics)
	sum := sha256.Sum256([]byte(strings.Join(topics, "")))
	return &tabled{Host: own, topics: topics, hash: sum[len(sum)-4:], agreed: map[string]bool{}}
}

func (t *tabled) NewStream(ctx context.Context, p peer.ID, ids ...protocol.ID) (network.Stream, error) {
	stream, err := t.Host.NewStream(ctx, p, ids...)
	if err != nil {
		return nil, err
	}
	return t.wrap(stream), nil
}

func (t *tabled) SetStreamHandler(id protocol.ID, handler network.StreamHandler) {
	t.Host.SetStreamHandler(id, func(stream network.Stream) { handler(t.wrap(stream)) })
}

func (t *tabled) SetStreamHandlerMatch(id protocol.ID, match func(protocol.ID) bool, handler network.StreamHandler) {
	t.Host.SetStreamHandlerMatch(id, match, func(stream network.Stream) { handler(t.wrap(stream)) })
}

func (t *tabled) wrap(stream network.Stream) network.Stream {
	if stream.Protocol() != "/meshsub/1.3.0" {
		return stream
	}
	return &tableStream{Stream: stream, tabled: t, in: bufio.NewReader(stream)}
}

type tableStream struct {
	network.Stream
	*tabled
	in         *bufio.Reader
	read       []byte // rewritten, and not yet read
	unwritten  []byte // an RPC that is not whole
	received   bool
	helloWrote bool
}

func (s *tableStream) Read(into []byte) (int, error) {
	if len(s.read) == 0 {
		size, err := binary.ReadUvarint(s.in)
		if err != nil {
			return 0, err
		}
		rpc := make([]byte, size)
		if _, err := io.ReadFull(s.in, rpc); err != nil {
			return 0, err
		}
		if !s.received {
			s.received = true
			s.lock.Lock()
			s.agreed[s.Conn().ID()] = offers(rpc, s.hash)
			s.lock.Unlock()
		}
		rpc = s.rewrite(rpc, s.nameOf)
		s.read = append(binary.AppendUvarint(nil, uint64(len(rpc))), rpc...)
	}
	count := copy(into, s.read)
	s.read = s.read[count:]
	return count, nil
}

func (s *tableStream) Write(data []byte) (int, error) {
	s.unwritten = append(s.unwritten, data...)
	for {
		size, head := binary.Uvarint(s.unwritten)
		if head <= 0 || len(s.unwritten)-head < int(size) {
			return len(data), nil
		}
		rpc := s.unwritten[head : head+int(size)]
		s.lock.Lock()
		agreed := s.agreed[s.Conn().ID()]
		s.lock.Unlock()
		if !s.helloWrote { // protobuf merges the control message with that of the library
			s.helloWrote = true
			rpc = append(bytes.Clone(rpc), nested(3, nested(extensions, nested(table, nested(1, s.hash))))...)
		} else if agreed {
			rpc = s.rewrite(rpc, s.indexOf)
		}
		s.unwritten = s.unwritten[head+int(size):]
		if _, err := s.Stream.Write(append(binary.AppendUvarint(nil, uint64(len(rpc))), rpc...)); err != nil {
			return 0, err
		}
	}
}

// The field in the place of one of that form, or nil.
type replace func(f form, number protowire.Number, value []byte) []byte

func (s *tableStream) nameOf(f form, number protowire.Number, value []byte) []byte {
	index, _ := protowire.ConsumeVarint(value)
	if number != f.index || index < 1 || index > uint64(len(s.topics)) {
		return nil
	}
	return nested(f.name, []byte(s.topics[index-1]))
}

func (s *tableStream) indexOf(f form, number protowire.Number, value []byte) []byte {
	if number != f.name {
		return nil
	}
	name, _ := protowire.ConsumeBytes(value)
	at := sort.SearchStrings(s.topics, string(name))
	if at == len(s.topics) || s.topics[at] != string(name) {
		return nil
	}
	return protowire.AppendVarint(protowire.AppendTag(nil, f.index, protowire.VarintType), uint64(at+1))
}

func (s *tableStream) rewrite(rpc []byte, with replace) []byte {
	return fields(rpc, func(number protowire.Number, value []byte) []byte {
		inner, size := protowire.ConsumeBytes(value)
		if number == 2 && size > 0 {
			return nested(2, topic(inner, message, with))
		}
		if number != 3 || size < 0 {
			return nil
		}
		return nested(3, fields(inner, func(kind protowire.Number, value []byte) []byte {
			entry, _ := protowire.ConsumeBytes(value)
			if of, ok := control[kind]; ok {
				return nested(kind, topic(entry, of, with))
			}
			return nil
		}))
	})
}

func topic(entry []byte, of form, with replace) []byte {
	return fields(entry, func(number protowire.Number, value []byte) []byte { return with(of, number, value) })
}

// The fields of a message, each as it is or as `change` makes it.
func fields(data []byte, change func(number protowire.Number, value []byte) []byte) []byte {
	out := []byte{}
	for len(data) > 0 {
		number, kind, head := protowire.ConsumeTag(data)
		if head < 0 {
			return append(out, data...)
		}
		size := protowire.ConsumeFieldValue(number, kind, data[head:])
		if size < 0 {
			return append(out, data...)
		}
		if changed := change(number, data[head:head+size]); changed != nil {
			out = append(out, changed...)
		} else {
			out = append(out, data[:head+size]...)
		}
		data = data[head+size:]
	}
	return out
}

func nested(number protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), value)
}

// Whether the hello in a first RPC has the hash.
func offers(rpc []byte, hash []byte) bool {
	found := [][]byte{rpc}
	for _, wanted := range []protowire.Number{3, extensions, table, 1} {
		next := [][]byte{}
		for _, each := range found {
			fields(each, func(number protowire.Number, value []byte) []byte {
				if inner, size := protowire.ConsumeBytes(value); number == wanted && size > 0 {
					next = append(next, inner)
				}
				return nil
			})
		}
		found = next
	}
	for _, each := range found {
		if bytes.Equal(each, hash) {
			return true
		}
	}
	return false
}
