"""The network in plain torch: encoder, connector, decoder, and what joins them. Testable without DeepSpeed."""
