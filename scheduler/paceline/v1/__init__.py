"""Messages and stubs generated from `proto/paceline/v1`; `make proto` writes them, nobody edits them."""
