#!/usr/bin/env bash
# Makes the state folder that tests/kafka/test_upgrade.py goes on with: make.sh CHECKOUT FOLDER
# CHECKOUT is the code that is to have written it, with its .venv and .jars; FOLDER must not exist. README.md says more.
set -euo pipefail
checkout=$(realpath "$1") folder=$(realpath -m "$2")
test ! -e "$folder"
mkdir -p "$folder"
cd "$checkout"
export PYTHONPATH=$PWD KILN_STATE=$folder/state
export KILN_MONITOR__LISTEN= # another Kiln may run on this machine
export KILN_KAFKA__EMBEDDED_PORT=${KILN_KAFKA__EMBEDDED_PORT:-29392}
export KILN_KAFKA__EMBEDDED_CONTROLLER_PORT=${KILN_KAFKA__EMBEDDED_CONTROLLER_PORT:-29393}
export KILN_BRIDGE__LISTEN='["/ip4/127.0.0.1/tcp/0"]'
# the broker must not remove what grows old in the repository
export KILN_KAFKA__RETENTION=36500d
export KILN_TRAFFIC__RATE=2 KILN_TRAFFIC__SEPARATORS=4 KILN_TRAFFIC__STREAMS=16
kiln() { .venv/bin/python -m kiln.deploy.cli "$@"; }

spool() { # SEED: live frames on the bridge's disk, as when Kafka was away
  .venv/bin/python - "$KILN_STATE/bridge/spool" "$1" <<'PYTHON'
import sys
import time
from pathlib import Path

from kiln.bridge.capture.sink import FrameSink
from kiln.bridge.capture.spool import Spool
from kiln.bridge.kafka.producers import FramesProducerError
from kiln.deploy.demo.traffic import Traffic, TrafficOptions


def away():
    raise FramesProducerError("there is no broker")


options = TrafficOptions(seed=int(sys.argv[2]), peers=2, copies=2, separators=4, streams=16, garbage=0.0, network="local-demo")
sink = FrameSink(away, "kiln.frames", Spool(Path(sys.argv[1]), 16 << 20), 1 << 20)
for frame in Traffic(options, time.time_ns(), 20.0).frames(messages=20):
    sink.put(frame.key, frame.value)
while not sink.status().spooled:
    time.sleep(0.1)  # a thread of the sink writes the spool, and signals nothing
sink.close(1.0)
print(sink.status())
PYTHON
}

echo "== 1. live: a bridge with its key, its numbers, its interests, what it published and how far it had come"
kiln interests --add controller --add model
kiln run --for "${LIVE_FOR:-60s}"

echo "== 1b. live batches without a receipt, as no bridge runs that could publish them"
spool 10
KILN_PUBLISH__ENABLED=false timeout --preserve-status 30s .venv/bin/python -m kiln.deploy.cli bridge
kiln run --no-network --catch-up

echo "== 2. a capture, all of it processed"
export KILN_TRAFFIC__PEERS=3 KILN_TRAFFIC__COPIES=2 KILN_TRAFFIC__GARBAGE=0.05 KILN_TRAFFIC__FORGED=0.04
for seconds in 3 6 9; do # of the same traffic: a longer one holds the messages of a shorter one again
  kiln generate "$folder/$seconds.rpc.gz" --for ${seconds}s --rate 8 --seed 11
done
kiln replay "$folder/3.rpc.gz"
kiln run --catch-up

echo "== 3. another, whose windows are still open"
date +%s%6N >"$folder/long_from" # log time, µs
kiln replay "$folder/6.rpc.gz"
KILN_BATCH__WINDOW=5m kiln run --no-network --for "${OPEN_FOR:-100s}"

echo "== 4. another, which is in Kafka and not read yet"
kiln replay "$folder/9.rpc.gz"

echo "== 5. frames on the bridge's disk"
spool 12

echo "== 6. packed without what can be made again, and without the name of the folder"
cd "$folder"
rm -rf state/logs state/demo state/scratch state/locks
grep -rlIF "$folder" state | while read -r file; do
  sed -i "s|$folder|/kept|g" "$file"
  rm -f "$(dirname "$file")/.$(basename "$file").crc" # Hadoop's checksum of what was there before
done
tar --sort=name --owner=0 --group=0 --numeric-owner --sparse -cf - state | xz -9e >state.tar.xz
ls -l state.tar.xz

echo "== 7. the same captures without any stop, to compare with"
cd "$checkout"
export KILN_STATE=$folder/undisturbed
for seconds in 3 6 9; do
  kiln replay "$folder/$seconds.rpc.gz"
done
kiln run --catch-up
