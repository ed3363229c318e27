"""Prepares a run when Locust has read its options: which users it starts, of which shape, against which server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc.experimental.gevent
from locust import events
from locust.dispatch import UsersDispatcher
from locust.exception import LocustError
from locust.runners import LocalRunner, WorkerRunner

from load_tests import staged  # not its class: Locust would take that for the shape of every run
from load_tests.locust_run import Run
from load_tests.options import refuse
from load_tests.shapes import SHAPES
from load_tests.targets import AUTO, protocol_of
from load_tests.users import StreamUser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from locust import User
    from locust.env import Environment
    from locust.runners import Runner


@events.init.add_listener
def on_init(environment: Environment, runner: Runner, **_: Any) -> None:
    # Locust has patched the standard library for gevent. gRPC has to be told before any channel is made, and after
    # --processes has forked.
    grpc.experimental.gevent.init_gevent()
    if not isinstance(runner, WorkerRunner):  # which is told by its master
        try:
            _choose_shape(environment, runner)
            _check_users(environment)
        except LocustError as error:
            refuse(str(error))
    environment.dispatcher_class = _dispatcher_of(environment)
    StreamUser.load = Run(environment)


def users_for(host: str, protocol: str, user_classes: Sequence[type[User]]) -> list[type[User]]:
    """Returns the users to start: if there are some of each protocol, only those of the host's. Others' stay."""
    protocols = {each.protocol for each in user_classes if issubclass(each, StreamUser)}
    wanted = protocol_of(host, protocol)
    return [
        each
        for each in user_classes
        if len(protocols) < 2 or not issubclass(each, StreamUser) or each.protocol == wanted
    ]


def _choose_shape(environment: Environment, runner: Runner) -> None:
    """Raises LocustError."""
    options = environment.parsed_options
    if options.stage_seconds is not None:
        if not isinstance(runner, LocalRunner) or environment.shape_class is not None or options.shape:
            raise LocustError("--stage-seconds: must be in one process, and without another shape")
        environment.shape_class = staged.StagedShape(options.stage_seconds, environment)
    elif options.shape:
        if environment.shape_class is not None:
            raise LocustError(f"--shape = {options.shape}: must be without another shape")
        environment.shape_class = SHAPES[options.shape](options)
        environment.shape_class.runner = runner


def _check_users(environment: Environment) -> None:
    """Raises LocustError. Without a host the web UI asks for it."""
    options, host = environment.parsed_options, environment.host or ""
    ours = [each for each in environment.user_classes if issubclass(each, StreamUser)]
    if options.protocol != AUTO and ours and all(each.protocol != options.protocol for each in ours):
        names = ", ".join(each.__name__ for each in ours)
        raise LocustError(f"--protocol = {options.protocol}: must be auto, or the one of {names}")
    if options.headless or host:
        for each in users_for(host, options.protocol, ours):
            try:
                each.check_host(host, options)  # type: ignore[attr-defined]
            except LocustError as error:
                raise LocustError(f"--host: {error}") from None


def _dispatcher_of(environment: Environment) -> type[UsersDispatcher]:
    class Dispatcher(UsersDispatcher):
        """Starts users of the host's protocol only. The host may be another one in the next run."""

        def __init__(self, worker_nodes: list[Any], user_classes: list[type[User]]) -> None:
            wanted = users_for(environment.host or "", environment.parsed_options.protocol, user_classes)
            super().__init__(worker_nodes, wanted)

    return Dispatcher
