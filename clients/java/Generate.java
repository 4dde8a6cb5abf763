import io.github.pdmesh.v1.GenerateRequest;
import io.github.pdmesh.v1.GenerateResponse;
import io.github.pdmesh.v1.MeshGrpc;
import io.github.pdmesh.v1.SamplingParams;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.Iterator;
import java.util.concurrent.TimeUnit;

/**
 * Reads a stream of pdmesh.v1.Mesh and prints its text as it comes: java Generate ROUTER PROMPT SEED MAX_TOKENS.
 *
 * <p>It is the least that a program needs: generated code, a deadline, the three kinds of events. docs/clients.md says how a
 * stream that breaks is continued.
 */
public final class Generate {
  private static final PrintStream OUT = new PrintStream(System.out, true, StandardCharsets.UTF_8);

  private Generate() {}

  public static void main(String[] arguments) throws InterruptedException {
    if (arguments.length != 4) {
      System.err.println("usage: java Generate ROUTER PROMPT SEED MAX_TOKENS");
      System.exit(2);
    }
    GenerateRequest request =
        GenerateRequest.newBuilder()
            .setText(arguments[1])
            .setSampling(
                SamplingParams.newBuilder()
                    .setSeed(Long.parseUnsignedLong(arguments[2]))
                    .setMaxTokens(Integer.parseUnsignedInt(arguments[3])))
            .build();
    ManagedChannel channel = ManagedChannelBuilder.forTarget(arguments[0]).usePlaintext().build();
    boolean completed = false;
    try {
      completed = read(MeshGrpc.newBlockingStub(channel).withDeadlineAfter(60, TimeUnit.SECONDS).generate(request));
    } catch (StatusRuntimeException error) {
      System.err.println(error.getStatus());
    } finally {
      channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
    }
    System.exit(completed ? 0 : 1);
  }

  /** Prints text until the last message. Returns whether it came: a stream without it is not complete, whatever its status. */
  private static boolean read(Iterator<GenerateResponse> stream) {
    boolean completed = false;
    while (stream.hasNext()) {
      GenerateResponse response = stream.next();
      switch (response.getEventCase()) {
        case STARTED:
          String seed = Long.toUnsignedString(response.getStarted().getSeed());
          System.err.printf("request %s, seed %s%n", response.getStarted().getRequestId(), seed);
          break;
        case DELTA:
          OUT.print(response.getDelta().getText());
          OUT.flush();
          break;
        case COMPLETED:
          completed = true;
          System.err.printf("%d tokens%n", response.getCompleted().getUsage().getCompletionTokens());
          break;
        default: // of a newer router
      }
    }
    return completed;
  }
}
