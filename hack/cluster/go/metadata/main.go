// metadata reads a file that describes devices of a claim as Kubernetes' own reader does, validates each of its
// objects, and prints their versions, one a line.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
)

func main() {
	stream := json.NewDecoder(os.Stdin)
	for stream.More() {
		var found metadata.DeviceMetadata
		var kind schema.GroupVersionKind
		var fault error
		err := devicemetadata.DecodeMetadataFromStream(stream, &found,
			devicemetadata.DecodeMetadataStoreGVKResult(&kind), devicemetadata.DecodeMetadataWithValidationResult(&fault))
		if err == nil {
			err = fault
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(kind.GroupVersion())
	}
}
