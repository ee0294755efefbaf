"""Generated protobuf code: `make proto` runs generate.sh. Change the .proto files, never the generated ones."""
