// Verdicts of Kubernetes' own compiler on device selectors, as the API server gives them to new objects.
//
// Each line of the input is an expression as a JSON string. Each line of the output is {"refusal": "…"}, empty for an
// expression that is taken.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apiserver/pkg/cel/environment"
	dracel "k8s.io/dynamic-resource-allocation/cel"
)

func main() {
	compiler := dracel.GetCompiler(dracel.Features{EnableConsumableCapacity: true})
	kind := environment.NewExpressions
	input := bufio.NewScanner(os.Stdin)
	input.Buffer(nil, 1<<24)
	output := bufio.NewWriter(os.Stdout)
	defer output.Flush()
	for input.Scan() {
		var expression string
		if err := json.Unmarshal(input.Bytes(), &expression); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
		result := compiler.CompileCELExpression(expression, dracel.Options{EnvType: &kind})
		refusal := ""
		switch {
		case len(expression) > resourceapi.CELSelectorExpressionMaxLength:
			refusal = "too long"
		case result.Error != nil:
			refusal = result.Error.Error()
		case result.MaxCost > resourceapi.CELSelectorExpressionMaxCost:
			refusal = fmt.Sprintf("too expensive: %d", result.MaxCost)
		}
		line, _ := json.Marshal(map[string]string{"refusal": refusal})
		fmt.Fprintln(output, string(line))
	}
}
