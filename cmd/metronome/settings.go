package main

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"sort"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/alecthomas/kong"
	"go.yaml.in/yaml/v4"
)

// settings resolves flags that the command line does not give: environment
// first, then the YAML file of --config. It remembers where each value came
// from, for metronome config.
type settings struct {
	file   string
	yaml   map[string]any
	used   map[string]bool
	origin map[string]string
	parsed *kong.Context
}

// load finds --config in the arguments, or METRONOME_CONFIG, and reads it.
func (s *settings) load(args []string) error {
	s.used, s.origin = map[string]bool{}, map[string]string{}
	s.file = os.Getenv(envName("config"))
	for i, a := range args {
		if v, ok := strings.CutPrefix(a, "--config="); ok {
			s.file = v
		} else if a == "--config" && i+1 < len(args) {
			s.file = args[i+1]
		}
	}
	if s.file == "" {
		return nil
	}
	data, err := readBounded(s.file)
	if err != nil {
		return usagef("--config: %v", err)
	}
	if err := yaml.Unmarshal(data, &s.yaml); err != nil {
		return usagef("--config %s: %v", s.file, plainYAML(err))
	}
	return nil
}

var yamlWords = strings.NewReplacer("construct errors: ", "", "cannot construct", "cannot take", "into map[string]interface {}", "as lines like NAME: VALUE", "into []string", "as a list",
	"!!str", "the text", "!!seq", "a list", "!!map", "a map", "!!int", "the number", "!!float", "the number", "!!bool", "the word")

// plainYAML says what is wrong with a YAML file without the types of YAML and Go.
func plainYAML(err error) string { return yamlWords.Replace(err.Error()) }

func envName(flag string) string {
	return "METRONOME_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// Validate is kong's hook; unknown settings are judged when the command is known.
func (s *settings) Validate(*kong.Application) error { return nil }

// Resolve gives the value of one flag that the command line leaves open.
func (s *settings) Resolve(_ *kong.Context, _ *kong.Path, flag *kong.Flag) (any, error) {
	if flag.Name == "help" || flag.Name == "config" || flag.Hidden {
		return nil, nil
	}
	if v, ok := os.LookupEnv(envName(flag.Name)); ok {
		s.origin[flag.Name] = envName(flag.Name)
		return v, nil
	}
	v, ok := s.yaml[flag.Name]
	if !ok {
		return nil, nil
	}
	s.used[flag.Name] = true
	if v == nil { // a line without a value says nothing
		return nil, nil
	}
	s.origin[flag.Name] = s.file
	return word(flag, v)
}

// word is a value of the file as it would stand on the command line.
func word(flag *kong.Flag, v any) (string, error) {
	list, many := v.([]any)
	if !many {
		list = []any{v}
	}
	words := make([]string, len(list))
	for i, e := range list {
		switch reflect.ValueOf(e).Kind() {
		case reflect.Map, reflect.Slice, reflect.Invalid:
			return "", errors.New("a value has no parts")
		}
		words[i] = fmt.Sprint(e)
	}
	if many && !flag.IsSlice() {
		return "", errors.New("one value, not a list")
	}
	return strings.Join(words, ","), nil
}

// blame adds to an error about a flag where the value came from, if that is
// not the command line.
func (s *settings) blame(err error) error {
	if err == nil {
		return nil
	}
	rest, ok := strings.CutPrefix(err.Error(), "--")
	name, _, _ := strings.Cut(rest, " ")
	name = strings.TrimSuffix(name, ":")
	if from := s.origin[name]; ok && from != "" && (s.parsed == nil || !s.onLine(name)) {
		return fmt.Errorf("%w (set by %s)", err, from)
	}
	return err
}

// checkAmounts refuses times and sizes that are not above 0, but where 0 is the
// default: below the flags 0 stands for the default, and who writes 0 does not
// mean that.
func (s *settings) checkAmounts() error {
	for _, group := range s.parsed.Selected().AllFlags(true) {
		for _, f := range group {
			switch v := f.Target.Interface().(type) {
			case time.Duration, Size:
				if f.Target.Int() <= 0 && f.Default != "0s" {
					return usagef("--%s is %v: want more than 0; the default is %s", f.Name, v, f.Default)
				}
			}
		}
	}
	return nil
}

// unknown names the settings of the file that no flag of the command took.
func (s *settings) unknown() error {
	var names []string
	for name := range s.yaml {
		if !s.used[name] && s.set(name) == nil {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	sort.Strings(names)
	return usagef("--config %s: no such setting here: %s; metronome config ROLE lists them", s.file, strings.Join(names, ", "))
}

// set finds a flag of the chosen command by name.
func (s *settings) set(name string) *kong.Flag {
	for _, group := range s.parsed.Selected().AllFlags(true) {
		for _, f := range group {
			if f.Name == name {
				return f
			}
		}
	}
	return nil
}

// ofUp are settings that up does not pass on: they are its own, or it chooses
// them for each child.
var ofUp = map[string]bool{"help": true, "json": true, "config": true, "listen": true, "prefill": true, "decode": true, "port": true, "advertise": true}

// childArgs are the flags that a child of up is started with: every setting
// that up shares with the child's role.
func (s *settings) childArgs(role string) []string {
	var args []string
	for _, node := range s.parsed.Model.Children {
		if node.Name != role {
			continue
		}
		for _, f := range node.Flags {
			ours := s.set(f.Name)
			if ours == nil || ours.Hidden || ofUp[f.Name] {
				continue
			}
			if v := show(ours.Target); v != "-" {
				args = append(args, "--"+f.Name+"="+v)
			}
		}
	}
	return args
}

type configCmd struct {
	Role string   `arg:"" enum:"up,serve,router,prefill,decode,registry" help:"up, serve, router, prefill, decode or registry."`
	Rest []string `arg:"" optional:"" passthrough:"" help:"Flags of that role, to see what they give."`
}

// Run prints the settings of a role as they would be if it were started now.
func (c *configCmd) Run(s *settings) error {
	var all cli
	inner := &settings{}
	args := append([]string{c.Role}, c.Rest...)
	if c.Role == "serve" || c.Role == "prefill" || c.Role == "decode" {
		args = append(args, "tiny") // the model is an argument, not a setting
	}
	if s.file != "" {
		args = append(args, "--config", s.file)
	}
	k, err := kong.New(&all, kong.Name("metronome"), kong.Writers(stdout, os.Stderr), kong.Resolvers(inner), kong.Exit(func(int) {}))
	if err != nil {
		return err
	}
	if err := inner.load(args); err != nil {
		return err
	}
	parsed, err := k.Parse(args)
	if err != nil {
		return usageError{err}
	}
	inner.parsed = parsed
	if err := errors.Join(inner.unknown(), inner.blame(inner.checkAmounts())); err != nil {
		return err
	}
	return inner.print()
}

// onLine says whether the command line gives a flag.
func (s *settings) onLine(name string) bool {
	for _, p := range s.parsed.Path {
		if p.Flag != nil && !p.Resolved && p.Flag.Name == name {
			return true
		}
	}
	return false
}

// chosen says whether somebody gave a setting: command line, environment or file.
func (s *settings) chosen(name string) bool { return s.origin[name] != "" || s.onLine(name) }

func (s *settings) print() error {
	w := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "SETTING\tVALUE\tUNIT\tORIGIN\tMEANING")
	for _, group := range s.parsed.Selected().AllFlags(true) {
		for _, f := range group {
			if f.Name == "help" || f.Hidden {
				continue
			}
			origin := "default"
			if s.onLine(f.Name) {
				origin = "--" + f.Name
			} else if o := s.origin[f.Name]; o != "" {
				origin = o
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", f.Name, show(f.Target), unit(f), origin, strings.TrimSuffix(f.Help, "."))
		}
	}
	return w.Flush()
}

func show(v reflect.Value) string {
	switch x := v.Interface().(type) {
	case string:
		if x == "" {
			return "-"
		}
	case []string:
		if len(x) == 0 {
			return "-"
		}
		return strings.Join(x, ",")
	}
	return fmt.Sprint(v.Interface())
}

func unit(f *kong.Flag) string {
	switch f.Target.Interface().(type) {
	case time.Duration:
		return "time"
	case Size:
		return "bytes"
	case Percent:
		return "share"
	case bool:
		return "yes/no"
	case int, float64:
		return map[string]string{"chunk": "tokens", "reserved-tokens": "tokens", "context": "tokens", "page-size": "tokens", "kv-pages": "pages", "threads": "threads",
			"tp": "ranks", "dp": "schedulers", "max-running": "sequences", "max-queued": "requests", "max-requests": "requests", "retries": "tries", "migrations": "moves",
			"sim-prefill-rate": "tokens/s", "sim-kv-bytes": "bytes", "port": "port", "prefill": "workers", "decode": "workers",
			"parallel-info-attempts": "tries", "heartbeat-failures": "probes", "health-failures": "probes"}[f.Name]
	}
	return "text"
}

// examples end each command's help.
var examples = map[string][2]string{
	"bench":          {"metronome bench engine tiny", "metronome bench engine --help"},
	"bench engine":   {"metronome bench engine tiny --rounds 3", "metronome bench engine model.gguf --threads 1 --prefill 512 --decode 1,16 --json"},
	"bench transfer": {"metronome bench transfer", "metronome bench transfer --extent 64KiB --size 256MiB --rounds 31 --json"},
	"bench loop":     {"metronome bench loop", "metronome bench loop --running 16 --waiting 1000,4096 --json"},
	"bench http":     {"metronome bench http http://127.0.0.1:8000", "metronome bench http http://127.0.0.1:8000 --beside http://127.0.0.1:9000 --prompt 2000 --rounds 31 --json"},

	"sim":      {"metronome sim --hours 1", "metronome sim --replay failure.json"},
	"up":       {"metronome up", "metronome up model.gguf --prefill 2 --decode 2 --port 8080"},
	"serve":    {"metronome serve tiny", "metronome serve model.gguf --listen 127.0.0.1:9000 --threads 4"},
	"router":   {"metronome router --prefill http://10.0.0.1:30000,8998 --decode http://10.0.0.2:30100", "metronome router --policy least_load --prefill http://127.0.0.1:30000 --decode http://127.0.0.1:30100"},
	"prefill":  {"metronome prefill tiny", "metronome prefill model.gguf --listen 10.0.0.1:30000 --bootstrap-listen 10.0.0.1:8998 --kv-listen 10.0.0.1:0 --token-file token"},
	"decode":   {"metronome decode tiny", "metronome decode model.gguf --listen 10.0.0.2:30100 --on-mismatch reject --token-file token"},
	"registry": {"metronome registry", "metronome registry --listen 10.0.0.1:8998 --token-file token"},
	"pull":     {"metronome pull smollm2", "metronome pull smollm2 --index https://mirror.example/simple/"},
	"models":   {"metronome models", "metronome models ~/models other.gguf --json"},
	"explain":  {"metronome explain 5f0c1c2f", "metronome explain req-17 --router http://10.0.0.2:8000 --token-file token"},
	"config":   {"metronome config decode", "METRONOME_KV_TIMEOUT=10s metronome config prefill"},
	"version":  {"metronome version", "metronome version --verbose"},
	"":         {"metronome up", "curl -s 127.0.0.1:8000/v1/chat/completions -d '{\"messages\":[{\"role\":\"user\",\"content\":\"Hello!\"}]}'"},

	"blocking-decode": {"metronome blocking-decode sim --engine=sim", "metronome blocking-decode tiny --listen 127.0.0.1:30101"},
}

// helpWithExamples is kong's help, then two examples that work.
func helpWithExamples(options kong.HelpOptions, ctx *kong.Context) error {
	if err := kong.DefaultHelpPrinter(options, ctx); err != nil {
		return err
	}
	name := ""
	if n := ctx.Selected(); n != nil {
		name = strings.TrimPrefix(n.FullPath(), "metronome ")
	}
	ex, ok := examples[name]
	if !ok {
		return errors.New("no examples for " + name)
	}
	_, err := fmt.Fprintf(ctx.Stdout, "\nExamples:\n  %s\n  %s\n", ex[0], ex[1])
	return err
}
