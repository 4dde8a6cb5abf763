"""What the protocol tells of server and models."""

from pdmesh.third_party.kserve import grpc_service_pb2 as pb
from pdmesh.third_party.kserve import model_config_pb2 as config_pb
from router.api.kserve.catalogue import INPUTS, OUTPUTS, PLATFORM, VERSION, Tensor
from router.api.protocol_errors import package_version

EXTENSIONS = ("parameters", "model_configuration")
_DATA_TYPES = {"BYTES": config_pb.TYPE_STRING}  # the others are called as their datatype


def server() -> pb.ServerMetadataResponse:
    """Name and version of this package."""
    return pb.ServerMetadataResponse(name=PLATFORM, version=package_version(), extensions=EXTENSIONS)


def model(name: str) -> pb.ModelMetadataResponse:
    """All tensors of a model."""
    return pb.ModelMetadataResponse(
        name=name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=[_metadata(tensor) for tensor in INPUTS.values()],
        outputs=[_metadata(tensor) for tensor in OUTPUTS.values()],
    )


def config(name: str) -> config_pb.ModelConfig:
    """The same, as Triton's tools read it."""
    return config_pb.ModelConfig(
        name=name,
        platform=PLATFORM,
        backend=PLATFORM,
        input=[
            config_pb.ModelInput(name=tensor.name, data_type=_data_type(tensor), dims=tensor.shape, optional=True)
            for tensor in INPUTS.values()
        ],
        output=[
            config_pb.ModelOutput(name=tensor.name, data_type=_data_type(tensor), dims=tensor.shape)
            for tensor in OUTPUTS.values()
        ],
        model_transaction_policy=config_pb.ModelTransactionPolicy(decoupled=True),
    )


def _metadata(tensor: Tensor) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)


def _data_type(tensor: Tensor) -> config_pb.DataType.ValueType:
    return _DATA_TYPES.get(tensor.datatype) or config_pb.DataType.Value(f"TYPE_{tensor.datatype}")
