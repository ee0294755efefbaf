"""What tests share: nodes, processes and programs to test against, and ways to await them."""
