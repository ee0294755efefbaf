#!/bin/sh
# Regenerates *_pb2.py and *_pb2.pyi beside their .proto files: `make proto`, or this script, from the repository's root.
# Needs the dev extra (grpcio-tools, mypy-protobuf) in .venv. The output is committed: nothing needs protoc at run time.
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
PLUGIN=${PLUGIN:-.venv/bin/protoc-gen-mypy}
"$PYTHON" -m grpc_tools.protoc -I . --plugin=protoc-gen-mypy="$PLUGIN" --python_out=. --mypy_out=. \
    schemas/proto/kiln/frame.proto schemas/proto/gossipsub/rpc.proto schemas/proto/pubsub_trace/trace.proto
