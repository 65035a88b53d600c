// Allocates devices for claims with the allocator of kube-scheduler, as its feature gates are by default in this release.
//
// Standard input is a stream of machines: {"slices": […], "classes": […], "node": "name", "cases": [[["claim", …], …], …]}.
// A case has pods, one after the other; a pod has claims, which get their devices at one time and keep them.
// Standard output: a line for each machine, with a list for each case, of what each pod gets:
// {"allocations": […]}, {"error": "…"}, or {} where nothing fits.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

const limit = 500 * time.Millisecond // a search that lasts longer is not compared

type machine struct {
	Slices  []*resourceapi.ResourceSlice     `json:"slices"`
	Classes classes                          `json:"classes"`
	Node    string                           `json:"node"`
	Cases   [][][]*resourceapi.ResourceClaim `json:"cases"`
}

type answer struct {
	Allocations []resourceapi.AllocationResult `json:"allocations,omitempty"`
	Error       string                         `json:"error,omitempty"`
}

type classes []*resourceapi.DeviceClass

func (c classes) List() ([]*resourceapi.DeviceClass, error) { return c, nil }

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	for _, class := range c {
		if class.Name == name {
			return class, nil
		}
	}
	return nil, fmt.Errorf("device class %s does not exist", name)
}

var features = structured.Features{
	AdminAccess: true, ConsumableCapacity: true, DeviceBindingAndStatus: true, DeviceTaints: true,
	FractionalCapacityRange: true, PartitionableDevices: true, PrioritizedList: true,
}

// keep adds what an allocation holds to the state, as the scheduler does for allocated claims.
func keep(state structured.AllocatedState, allocation resourceapi.AllocationResult) {
	for _, result := range allocation.Devices.Results {
		id := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
		switch {
		case result.AdminAccess != nil && *result.AdminAccess:
		case result.ShareID != nil:
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, result.ShareID))
			if result.ConsumedCapacity != nil {
				state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, result.ConsumedCapacity))
			}
		default:
			state.AllocatedDevices.Insert(id)
		}
	}
}

func allocate(state structured.AllocatedState, from machine, claims []*resourceapi.ResourceClaim, cache *cel.Cache) answer {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	allocator, err := structured.NewAllocator(ctx, features, state, from.Classes, from.Slices, cache)
	if err != nil {
		return answer{Error: err.Error()}
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: from.Node}}
	found, err := allocator.Allocate(ctx, node, claims)
	if err != nil {
		return answer{Error: err.Error()}
	}
	for _, allocation := range found {
		keep(state, allocation)
	}
	return answer{Allocations: found}
}

func run() error {
	input, output := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	cache := cel.NewCache(1000, cel.Features{EnableConsumableCapacity: true})
	for input.More() {
		var from machine
		if err := input.Decode(&from); err != nil {
			return err
		}
		answers := [][]answer{}
		for _, pods := range from.Cases {
			state := structured.AllocatedState{
				AllocatedDevices:         sets.New[structured.DeviceID](),
				AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
				AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
			}
			told := []answer{}
			for _, claims := range pods {
				told = append(told, allocate(state, from, claims, cache))
			}
			answers = append(answers, told)
		}
		if err := output.Encode(answers); err != nil {
			return err
		}
	}
	return nil
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
