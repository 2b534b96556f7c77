"""RabbitMQ: `broker` is the port, the rest is what it is made of."""

from oraculo.brokers.rabbitmq.broker import RabbitMQBroker

__all__ = ["RabbitMQBroker"]
