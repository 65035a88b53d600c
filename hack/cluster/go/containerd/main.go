// containerd and ctr in one program. The name by which it is called selects one of them.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	_ "github.com/containerd/containerd/v2/cmd/containerd/builtins"
	"github.com/containerd/containerd/v2/cmd/containerd/command"
	ctr "github.com/containerd/containerd/v2/cmd/ctr/app"
)

func main() {
	name, program := filepath.Base(os.Args[0]), command.App()
	if name == "ctr" {
		program = ctr.New()
	}
	if err := program.Run(os.Args); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %s\n", name, err)
		os.Exit(1)
	}
}
