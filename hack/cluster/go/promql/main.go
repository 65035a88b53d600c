// Evaluates PromQL with the engine of Prometheus, over series that are given.
//
// Standard input: {"load": "load 30s\n  name{label=\"value\"} 1+1x60\n", "at": 1800, "queries": ["up == 0"]}.
// Standard output: for each query {"samples": [{"labels": {…}, "value": "1"}]} or {"error": "…"}.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/util/teststorage"
)

type input struct {
	Load    string   `json:"load"`
	At      int64    `json:"at"`
	Queries []string `json:"queries"`
}

type sample struct {
	Labels map[string]string `json:"labels"`
	Value  string            `json:"value"`
}

type answer struct {
	Samples []sample `json:"samples"`
	Error   string   `json:"error,omitempty"`
}

// failing ends the program where a test would end.
type failing struct{}

func (failing) Helper()                           {}
func (failing) Cleanup(func())                    {}
func (failing) Name() string                      { return "promql" }
func (failing) Logf(format string, args ...any)   {}
func (failing) Errorf(format string, args ...any) { fail(fmt.Sprintf(format, args...)) }
func (failing) FailNow()                          { fail("the series cannot be loaded") }
func (failing) Fatal(args ...any)                 { fail(fmt.Sprint(args...)) }
func (failing) Fatalf(format string, args ...any) { fail(fmt.Sprintf(format, args...)) }

func fail(text string) {
	fmt.Fprintln(os.Stderr, text)
	os.Exit(1)
}

func main() {
	var in input
	if err := json.NewDecoder(os.Stdin).Decode(&in); err != nil {
		fail(err.Error())
	}
	series := promqltest.LoadedStorage(failing{}, in.Load)
	defer series.Close()
	engine := promql.NewEngine(promql.EngineOpts{
		MaxSamples: 1_000_000, Timeout: time.Minute, LookbackDelta: 5 * time.Minute,
	})
	answers := make([]answer, 0, len(in.Queries))
	for _, text := range in.Queries {
		answers = append(answers, evaluate(engine, series, text, time.Unix(in.At, 0)))
	}
	if err := json.NewEncoder(os.Stdout).Encode(answers); err != nil {
		fail(err.Error())
	}
}

func evaluate(engine *promql.Engine, series *teststorage.TestStorage, text string, at time.Time) answer {
	query, err := engine.NewInstantQuery(context.Background(), series, nil, text, at)
	if err != nil {
		return answer{Error: err.Error()}
	}
	defer query.Close()
	result := query.Exec(context.Background())
	if result.Err != nil {
		return answer{Error: result.Err.Error()}
	}
	found, err := result.Vector()
	if err != nil {
		return answer{Error: err.Error()}
	}
	samples := make([]sample, 0, len(found))
	for _, one := range found {
		samples = append(samples, sample{one.Metric.Map(), strconv.FormatFloat(one.F, 'g', -1, 64)})
	}
	return answer{Samples: samples}
}
