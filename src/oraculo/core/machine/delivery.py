"""Delivery of the aggregate: when an attempt is due, which engine makes it, and how it went."""

from oraculo.core.events import Delivered, DeliveryFailed, DeliveryMoved, Verdict
from oraculo.core.history import Happened
from oraculo.core.run import Changes, DeliveryStatus, Run

# The engine that ends a run delivers its aggregate at once. After these seconds another engine may do it instead,
# unless the first one moved the delivery because it needs longer or waits for its turn.
DELIVERY_LEASE = 15.0


def delivered(run: Run, event: Delivered, now: float, changes: Changes) -> Verdict:
    """Close a delivery that reached its target."""
    delivery = run.head.deliveries[event.channel]
    if event.edition != run.head.edition or delivery.status is not DeliveryStatus.PENDING:
        return Verdict.NOTHING
    delivery.status, delivery.error, delivery.due_at = DeliveryStatus.DELIVERED, None, None
    delivery.attempts += 1
    detail = f"{delivery.channel} {delivery.target}, versao {event.edition}"
    changes.record(now, Happened.DELIVERED, detail=detail)
    _set_next_timer(run)
    return Verdict.APPLIED


def delivery_failed(run: Run, event: DeliveryFailed, now: float, changes: Changes) -> Verdict:
    """Set the next attempt of a delivery, or give it up."""
    delivery = run.head.deliveries[event.channel]
    if event.edition != run.head.edition or delivery.status is not DeliveryStatus.PENDING:
        return Verdict.NOTHING
    delivery.attempts += 1
    delivery.error, delivery.due_at = event.reason, event.retry_at
    what = Happened.DELIVERY_FAILED
    if event.retry_at is None:
        delivery.status, what = DeliveryStatus.UNDELIVERED, Happened.UNDELIVERED
    detail = f"{delivery.channel} {delivery.target}: {event.reason}"
    changes.record(now, what, attempt=delivery.attempts, detail=detail)
    _set_next_timer(run)
    return Verdict.APPLIED


def delivery_moved(run: Run, event: DeliveryMoved, now: float, changes: Changes) -> Verdict:
    """Extend the lease of an engine, unless the delivery is done or another engine has taken it over."""
    delivery = run.head.deliveries[event.channel]
    is_pending = event.edition == run.head.edition and delivery.status is DeliveryStatus.PENDING
    if not is_pending or delivery.due_at != event.due_at:
        return Verdict.NOTHING
    delivery.due_at = event.until
    changes.dirty = True
    _set_next_timer(run)
    return Verdict.APPLIED


def begin(run: Run, now: float, changes: Changes) -> None:
    """Make every delivery of a new aggregate due. The engine that commits this makes the first attempts."""
    for delivery in run.head.deliveries:
        delivery.status, delivery.edition, delivery.attempts = DeliveryStatus.PENDING, run.head.edition, 0
        delivery.due_at, delivery.error = now + DELIVERY_LEASE, None
    _set_next_timer(run)
    changes.deliver = range(len(run.head.deliveries))


def lease_due(run: Run, now: float, changes: Changes) -> Verdict:
    """Lease the deliveries that are due to the engine that commits this."""
    for number, delivery in enumerate(run.head.deliveries):
        if delivery.status is DeliveryStatus.PENDING and delivery.due_at is not None and delivery.due_at <= now:
            delivery.due_at = now + DELIVERY_LEASE
            changes.deliver = (*changes.deliver, number)
            changes.dirty = True
    _set_next_timer(run)
    return Verdict.APPLIED


def _set_next_timer(run: Run) -> None:
    due = [d.due_at for d in run.head.deliveries if d.status is DeliveryStatus.PENDING and d.due_at is not None]
    if not run.is_open:
        run.head.due_at = min(due, default=None)
