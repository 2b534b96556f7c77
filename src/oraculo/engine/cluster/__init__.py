"""The engines that share a store, and the brokers that they share."""
