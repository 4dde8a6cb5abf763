"""What the protocol tells of server and models."""

from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdmesh.runtime.rpc.channel import connect
from pdmesh.third_party.kserve import grpc_service_pb2 as pb
from pdmesh.third_party.kserve import model_config_pb2 as config_pb
from router.api.kserve.tensors import INPUTS, OUTPUTS
from tests.router.kserve.calls import serving


async def test_server_and_model(model_folder: Path) -> None:
    async with serving(model_folder) as (_, stub):
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert (await stub.ModelReady(pb.ModelReadyRequest(name="tiny", version="1"))).ready
        assert (await stub.ServerMetadata(pb.ServerMetadataRequest())).name == "pdmesh"
        model = await stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny"))
        assert {tensor.name for tensor in model.inputs} == INPUTS.keys()
        assert {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in model.outputs}["text_output"] == ("BYTES", [-1])
        index = await stub.RepositoryIndex(pb.RepositoryIndexRequest())
        assert [(entry.name, entry.version, entry.state) for entry in index.models] == [("tiny", "1", "READY")]


async def test_configuration_for_tools(model_folder: Path) -> None:
    async with serving(model_folder) as (_, stub):
        config = (await stub.ModelConfig(pb.ModelConfigRequest(name="tiny"))).config
        assert config.model_transaction_policy.decoupled and config.max_batch_size == 0
        assert {tensor.name: tensor.data_type for tensor in config.input}["text_input"] == config_pb.TYPE_STRING
        assert len(config.output) == len(OUTPUTS)


async def test_a_mesh_that_lost_its_workers_is_not_ready(model_folder: Path) -> None:
    async with serving(model_folder, prefill=0) as (mesh, stub):
        await mesh["d0"].kill()
        while (await stub.ServerReady(pb.ServerReadyRequest())).ready:
            await mesh.router.core.fleet.changes.next.wait()
        index = await stub.RepositoryIndex(pb.RepositoryIndexRequest())
        assert [entry.state for entry in index.models] == ["UNAVAILABLE"]
        assert not (await stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))).models


async def test_health_and_reflection_know_all_protocols(model_folder: Path) -> None:
    names = {"pdmesh.v1.Mesh", "inference.GRPCInferenceService", "vllm.grpc.engine.VllmEngine"}
    async with serving(model_folder) as (mesh, _):
        channel = connect(mesh.router.server.address)
        health = health_pb2_grpc.HealthStub(channel)
        for name in names:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asking = reflection_pb2.ServerReflectionRequest(list_services="")
        replies = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asking]))
        listed = {service.name async for reply in replies for service in reply.list_services_response.service}
        assert names <= listed
        await channel.close()
