// Generate reads a stream of pdmesh.v1.Mesh and prints its text as it comes.
//
//	generate [-seed N] [-max-tokens N] ROUTER PROMPT
//
// It is the least that a program needs: generated code, a deadline, the three kinds of events. docs/clients.md says how a stream
// that breaks is continued.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	pb "github.com/pdmesh/pdmesh/gen/go/pdmesh/v1"
	"google.golang.org/grpc"
)

func main() {
	seed := flag.Uint64("seed", 7, "determines every draw")
	maxTokens := flag.Uint("max-tokens", 40, "bounds the output")
	flag.Parse()
	if flag.NArg() != 2 {
		fmt.Fprintln(os.Stderr, "usage: generate [-seed N] [-max-tokens N] ROUTER PROMPT")
		os.Exit(2)
	}
	maxTokens32 := uint32(*maxTokens)
	request := &pb.GenerateRequest{
		Prompt:   &pb.GenerateRequest_Text{Text: flag.Arg(1)},
		Sampling: &pb.SamplingParams{Seed: seed, MaxTokens: &maxTokens32},
	}
	if err := generate(flag.Arg(0), request); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// generate prints the answer of one router, which has a minute for it.
func generate(router string, request *pb.GenerateRequest) error {
	// The grpc of Debian 12 knows these names. From 1.64 on: grpc.NewClient and insecure.NewCredentials.
	connection, err := grpc.Dial(router, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	stream, err := pb.NewMeshClient(connection).Generate(ctx, request)
	if err != nil {
		return err
	}
	return read(stream)
}

// read prints text until the last message. A stream without `completed` is not complete, whatever its status.
func read(stream pb.Mesh_GenerateClient) error {
	completed := false
	for {
		response, err := stream.Recv()
		if err == io.EOF && completed {
			return nil
		}
		if err == io.EOF {
			return fmt.Errorf("the stream ended before it was complete")
		}
		if err != nil {
			return err
		}
		switch event := response.Event.(type) {
		case *pb.GenerateResponse_Started:
			fmt.Fprintf(os.Stderr, "request %s, seed %d\n", event.Started.RequestId, event.Started.Seed)
		case *pb.GenerateResponse_Delta:
			fmt.Print(event.Delta.Text)
		case *pb.GenerateResponse_Completed:
			completed = true
			fmt.Fprintf(os.Stderr, "%d tokens\n", event.Completed.Usage.GetCompletionTokens())
		}
	}
}
