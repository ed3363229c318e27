"""A client of the server, made of the contract alone: one answer as it is made, and a request that is refused.

    batchserve serve --model bundled --port 50051
    python docs/examples/grpc_client.py 127.0.0.1:50051

Any language can do the same with what protoc makes of protos/batchserve/v1/generation.proto.
"""

from __future__ import annotations

import sys

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from batchserve.v1 import generation_pb2, generation_pb2_grpc

MESSAGE = 'Write this JSON as a record.\n{\n  "name": "socket reader",\n  "version": 3108\n}'


def main(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        service = generation_pb2_grpc.GenerationServiceStub(channel)
        chat = generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user", text=MESSAGE)])
        request = generation_pb2.GenerateRequest(chat=chat)
        request.sampling_params.temperature = 0.0
        request.stop.max_tokens = 100
        try:
            # The call's deadline is the request's; cancelling the call frees its memory.
            for message in service.StreamGenerate(request, timeout=60.0):
                if message.HasField("delta"):
                    print(message.delta.text, end="", flush=True)
                elif message.HasField("finished"):
                    usage = message.finished.usage
                    print(f"\n{usage.completion_tokens} tokens, {usage.accepted_draft_tokens} of them from drafts")
        except grpc.RpcError as error:
            show(error)
            return 1

        request.sampling_params.top_p = 1.5
        try:
            service.Generate(request, timeout=60.0)
        except grpc.RpcError as error:
            show(error)
    return 0


def show(error: grpc.RpcError) -> None:
    """The status and, where the server sent one, the reason with the field, its value and its bound."""
    print(f"{error.code().name}: {error.details()}")
    status = rpc_status.from_call(error)
    for detail in () if status is None else status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            print(f"{info.reason}: {dict(sorted(info.metadata.items()))}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
