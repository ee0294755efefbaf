package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"time"

	pubsub "github.com/libp2p/go-libp2p-pubsub"
	pb "github.com/libp2p/go-libp2p-pubsub/pb"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/protocol"
	"golang.org/x/crypto/blake2b"
)

const wakuRelay = protocol.ID("/vac/waku/relay/2.0.0")

// The options by which nodes of other networks differ from the default, as go-waku (waku/v2/protocol/relay) and Lotus
// (node/modules/lp2p) set them, and a score of each peer.
func networkOptions(name string, scores *scoreBoard) ([]pubsub.Option, error) {
	scored := []pubsub.Option{
		pubsub.WithPeerScore(
			&pubsub.PeerScoreParams{
				AppSpecificScore:            func(peer.ID) float64 { return 0 },
				AppSpecificWeight:           1,
				BehaviourPenaltyThreshold:   0,
				BehaviourPenaltyWeight:      -10,
				BehaviourPenaltyDecay:       pubsub.ScoreParameterDecay(time.Hour),
				DecayInterval:               pubsub.DefaultDecayInterval,
				DecayToZero:                 pubsub.DefaultDecayToZero,
				RetainScore:                 6 * time.Hour,
				Topics:                      map[string]*pubsub.TopicScoreParams{},
				IPColocationFactorThreshold: 1000,
			},
			&pubsub.PeerScoreThresholds{GossipThreshold: -500, PublishThreshold: -1000, GraylistThreshold: -2500},
		),
		pubsub.WithPeerScoreInspect(scores.see, 200*time.Millisecond),
		// the defaults are 32 messages each, beyond which go drops them: too few on a busy machine
		pubsub.WithValidateQueueSize(4096),
		pubsub.WithPeerOutboundQueueSize(4096),
	}
	switch name {
	case "":
		return nil, nil
	case "waku":
		return append(
			scored,
			pubsub.WithMessageSignaturePolicy(pubsub.StrictNoSign),
			pubsub.WithNoAuthor(),
			pubsub.WithMessageIdFn(func(message *pb.Message) string {
				hash := sha256.Sum256(message.Data)
				return string(hash[:])
			}),
			pubsub.WithGossipSubProtocols(
				[]protocol.ID{wakuRelay, pubsub.GossipSubID_v11, pubsub.GossipSubID_v10, pubsub.FloodSubID},
				func(feature pubsub.GossipSubFeature, of protocol.ID) bool {
					switch feature {
					case pubsub.GossipSubFeatureMesh:
						return of != pubsub.FloodSubID
					case pubsub.GossipSubFeaturePX:
						return of == pubsub.GossipSubID_v11 || of == wakuRelay
					}
					return false
				},
			),
		), nil
	case "filecoin":
		return append(
			scored,
			pubsub.WithFloodPublish(true),
			pubsub.WithMessageIdFn(func(message *pb.Message) string {
				hash := blake2b.Sum256(message.Data)
				return string(hash[:])
			}),
		), nil
	}
	return nil, fmt.Errorf("no network %q", name)
}

// As Lotus scores its topics: invalid messages cost most.
func scoreTopic(topic *pubsub.Topic) error {
	return topic.SetScoreParams(&pubsub.TopicScoreParams{
		TopicWeight:                    0.1,
		TimeInMeshWeight:               0.0002778,
		TimeInMeshQuantum:              time.Second,
		TimeInMeshCap:                  1,
		FirstMessageDeliveriesWeight:   0.5,
		FirstMessageDeliveriesDecay:    pubsub.ScoreParameterDecay(10 * time.Minute),
		FirstMessageDeliveriesCap:      100,
		InvalidMessageDeliveriesWeight: -1000,
		InvalidMessageDeliveriesDecay:  pubsub.ScoreParameterDecay(time.Hour),
	})
}

// The lowest score that each peer ever had, and the last.
type scoreBoard struct {
	sync.Mutex
	lowest, now map[string]float64
}

func (b *scoreBoard) see(scores map[peer.ID]float64) {
	b.Lock()
	defer b.Unlock()
	b.now = map[string]float64{}
	for id, score := range scores {
		b.now[id.String()] = score
		if known, found := b.lowest[id.String()]; !found || score < known {
			b.lowest[id.String()] = score
		}
	}
}

func (b *scoreBoard) tell() answer {
	b.Lock()
	defer b.Unlock()
	lowest := map[string]float64{}
	for id, score := range b.lowest {
		lowest[id] = score
	}
	return answer{"event": "done", "lowest": lowest, "now": b.now}
}

// Publishes messages at a rate in a task of its own, and answers when all are out.
func (n *node) publishMany(id json.RawMessage, on *joined, c command) {
	started := time.Now()
	sent := 0
	var last error
	for number := 0; number < c.Count; number++ {
		if c.Rate > 0 {
			time.Sleep(time.Until(started.Add(time.Duration(float64(number) / c.Rate * float64(time.Second)))))
		}
		data := []byte(fmt.Sprintf("%s %d ", c.Tag, number))
		if missing := c.Size - len(data); missing > 0 {
			data = append(data, bytes.Repeat([]byte("."), missing)...)
		}
		if err := on.topic.Publish(context.Background(), data); err != nil {
			last = err
		} else {
			sent++
		}
	}
	done := answer{"event": "published", "topic": c.Topic, "sent": sent, "failed": c.Count - sent, "id": id}
	if last != nil {
		done["text"] = strings.TrimSpace(last.Error())
	}
	tell(done)
}
