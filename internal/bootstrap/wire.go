//metronome:pure

package bootstrap

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"strings"

	"github.com/metronome-serve/metronome/internal/api"
)

// object is a JSON object whose values are not decoded yet. Keys are compared
// exactly, as SGLang does; a struct's would match in any case.
type object map[string]json.RawMessage

func parseObject(body []byte) (object, error) {
	var o object
	if err := json.Unmarshal(body, &o); err != nil {
		return nil, fmt.Errorf("the body is not a JSON object: %s", api.JSONFault(err))
	}
	if o == nil {
		return nil, errors.New("the body is null, want a JSON object")
	}
	return o, nil
}

// null says that the key is missing or null.
func (o object) null(key string) bool {
	raw, ok := o[key]
	return !ok || string(raw) == "null"
}

func (o object) missing(keys ...string) error {
	for _, key := range keys {
		if _, ok := o[key]; !ok {
			return fmt.Errorf("the key %q is missing", key)
		}
	}
	return nil
}

// int is an integer within [low, high]; a decimal string passes as a number.
func (o object) int(key string, low, high int64) (int, error) {
	raw, ok := o[key]
	if !ok {
		return 0, fmt.Errorf("the key %q is missing", key)
	}
	n, err := integer(raw)
	if err != nil {
		return 0, fmt.Errorf("%q is %s, want an integer", key, short(string(raw)))
	}
	if n < low || n > high {
		return 0, fmt.Errorf("%q is %d, want %d to %d", key, n, low, high)
	}
	return int(n), nil
}

// text is a string of at most maxWord bytes; missing and null are "".
func (o object) text(key string) (string, error) {
	if o.null(key) {
		return "", nil
	}
	var s string
	if err := json.Unmarshal(o[key], &s); err != nil {
		return "", fmt.Errorf("%q is %s, want a string or null", key, short(string(o[key])))
	}
	if len(s) > maxWord {
		return "", fmt.Errorf("%q has %d bytes, want at most %d", key, len(s), maxWord)
	}
	return s, nil
}

// flag is a boolean; 0 and 1 pass, missing and null are false.
func (o object) flag(key string) (bool, error) {
	switch raw := string(o[key]); raw {
	case "true", "1":
		return true, nil
	case "false", "0", "", "null":
		return false, nil
	default:
		return false, fmt.Errorf("%q is %s, want true or false", key, short(raw))
	}
}

// integer reads a JSON number without fraction or exponent, or a string of one.
func integer(raw json.RawMessage) (int64, error) {
	s := string(raw)
	if strings.HasPrefix(s, `"`) {
		if err := json.Unmarshal(raw, &s); err != nil {
			return 0, err
		}
	}
	return decimal(s)
}

// decimal reads what Python's int() reads: SGLang's registry passes query
// parameters and some fields through it. So " 1", "01" and "0_0" are numbers.
// A number beyond 64 bits gives the nearest one with an error that is strconv.ErrRange.
func decimal(s string) (int64, error) {
	s = strings.TrimSpace(s)
	digits := strings.TrimLeft(s, "+-")
	if len(s)-len(digits) > 1 || strings.HasPrefix(digits, "_") || strings.HasSuffix(digits, "_") || strings.Contains(digits, "__") {
		return 0, strconv.ErrSyntax
	}
	return strconv.ParseInt(strings.ReplaceAll(s, "_", ""), 10, 64)
}

// parseRegistration reads the body of PUT /route.
func parseRegistration(body []byte) (Registration, error) {
	o, err := parseObject(body)
	if err != nil {
		return Registration{}, err
	}
	var r Registration
	for _, step := range []func(object) error{r.parseSizes, r.parseAddress, r.parseOptions} {
		if err := step(o); err != nil {
			return Registration{}, err
		}
	}
	return r, nil
}

func (r *Registration) parseSizes(o object) (err error) {
	var n [10]int
	for i, key := range []string{
		"attn_tp_size", "attn_cp_size", "pp_size", "attn_dp_size", "system_dp_size",
		"attn_tp_rank", "attn_cp_rank", "pp_rank", "attn_dp_rank", "system_dp_rank",
	} {
		low := int64(1)
		if i >= 5 {
			low = 0
		}
		if n[i], err = o.int(key, low, maxRanks); err != nil {
			return err
		}
	}
	// With DP attention the system has one DP group and attention is split; else the other way round.
	r.TP, r.CP, r.PP, r.DP = n[0], n[1], n[2], n[4]
	r.Rank = Rank{TP: n[5], CP: n[6], PP: n[7], DP: n[9]}
	if r.DP == 1 {
		r.DP, r.Rank.DP = n[3], n[8]
	}
	if !r.Info.sized() {
		return fmt.Errorf("dp %d · cp %d · tp %d · pp %d is more than %d ranks", r.DP, r.CP, r.TP, r.PP, maxRanks)
	}
	if !r.Info.holds(r.Rank) {
		return fmt.Errorf("rank %v is outside the sizes dp %d, cp %d, tp %d, pp %d", r.Rank, r.DP, r.CP, r.TP, r.PP)
	}
	return nil
}

func (r *Registration) parseAddress(o object) (err error) {
	if err := o.missing("rank_ip"); err != nil {
		return err
	}
	if r.IP, err = o.text("rank_ip"); err != nil {
		return err
	}
	if r.IP, err = CheckHost(r.IP); err != nil {
		return fmt.Errorf(`"rank_ip": %w`, err)
	}
	r.Port, err = o.int("rank_port", 1, math.MaxUint16)
	return err
}

func (r *Registration) parseOptions(o object) (err error) {
	if r.PageSize, err = o.int("page_size", 1, math.MaxInt32); err != nil {
		return err
	}
	if err := o.missing("kv_cache_dtype"); err != nil {
		return err
	}
	if r.KVDType, err = o.text("kv_cache_dtype"); err != nil {
		return err
	}
	r.FollowRoom = true
	if _, told := o["load_balance_method"]; told {
		method, err := o.text("load_balance_method")
		if err != nil {
			return err
		}
		r.FollowRoom = method == followRoom
	}
	return r.Info.parseOptional(o)
}

const (
	followRoom  = "follow_bootstrap_room" // the load balance method where DP rank = room mod DP
	earlyPolicy = "early"                 // the allocation policy that is meant when none is told
)

// parseOptional reads the fields that registration and answer share and that
// either may leave out.
func (i *Info) parseOptional(o object) (err error) {
	if i.KVLayout, err = o.text("kv_layout"); err != nil {
		return err
	}
	if i.AllocationPolicy, err = o.text("decode_allocation_policy"); err != nil {
		return err
	}
	if i.AllocationPolicy == earlyPolicy {
		i.AllocationPolicy = ""
	}
	if i.LayerSplit, err = o.flag("enable_dsa_cache_layer_split"); err != nil {
		return err
	}
	if i.KVSharding, err = o.flag("enable_kv_cache_sharding"); err != nil {
		return err
	}
	if !o.null("prefill_http_port") {
		if i.PrefillHTTPPort, err = o.int("prefill_http_port", 1, math.MaxUint16); err != nil {
			return err
		}
	}
	i.SpecLayout, err = o.layout("dsv41_spec_layout")
	return err
}

// layout is an object as JSON with sorted keys, so that two equal ones compare
// equal; missing and null are "".
func (o object) layout(key string) (string, error) {
	if o.null(key) {
		return "", nil
	}
	var fields map[string]any
	dec := json.NewDecoder(strings.NewReader(string(o[key])))
	dec.UseNumber()
	if err := dec.Decode(&fields); err != nil {
		return "", fmt.Errorf("%q is %s, want an object or null", key, short(string(o[key])))
	}
	b, err := json.Marshal(fields)
	if err != nil {
		return "", fmt.Errorf("%q: %w", key, err)
	}
	if len(b) > maxSpec {
		return "", fmt.Errorf("%q has %d bytes, want at most %d", key, len(b), maxSpec)
	}
	return string(b), nil
}

// sized says that all four sizes are there and name a sane number of ranks.
func (i *Info) sized() bool {
	n := 1
	for _, size := range [4]int{i.DP, i.CP, i.TP, i.PP} {
		if size < 1 || size > maxRanks {
			return false
		}
		if n *= size; n > maxRanks {
			return false
		}
	}
	return true
}

// holds says that the rank lies within the sizes.
func (i *Info) holds(r Rank) bool {
	return r.DP >= 0 && r.DP < i.DP && r.CP >= 0 && r.CP < i.CP && r.TP >= 0 && r.TP < i.TP && r.PP >= 0 && r.PP < i.PP
}

func (r Rank) String() string { return fmt.Sprintf("dp %d cp %d tp %d pp %d", r.DP, r.CP, r.TP, r.PP) }

// registrationBody is what PUT /route carries; fields at their default are
// left out, so that an older registry meets nothing new.
type registrationBody struct {
	AttnTPSize   int             `json:"attn_tp_size"`
	AttnTPRank   int             `json:"attn_tp_rank"`
	AttnCPSize   int             `json:"attn_cp_size"`
	AttnCPRank   int             `json:"attn_cp_rank"`
	AttnDPSize   int             `json:"attn_dp_size"`
	AttnDPRank   int             `json:"attn_dp_rank"`
	PPSize       int             `json:"pp_size"`
	PPRank       int             `json:"pp_rank"`
	SystemDPSize int             `json:"system_dp_size"`
	SystemDPRank int             `json:"system_dp_rank"`
	RankIP       string          `json:"rank_ip"`
	RankPort     int             `json:"rank_port"`
	PageSize     int             `json:"page_size"`
	KVDType      *string         `json:"kv_cache_dtype"`
	LoadBalance  string          `json:"load_balance_method"`
	KVLayout     string          `json:"kv_layout,omitempty"`
	LayerSplit   bool            `json:"enable_dsa_cache_layer_split,omitempty"`
	KVSharding   bool            `json:"enable_kv_cache_sharding,omitempty"`
	HTTPPort     int             `json:"prefill_http_port,omitempty"`
	SpecLayout   json.RawMessage `json:"dsv41_spec_layout,omitempty"`
	Policy       string          `json:"decode_allocation_policy,omitempty"`
}

func (r *Registration) body() ([]byte, error) {
	b := registrationBody{
		AttnTPSize: r.TP, AttnTPRank: r.Rank.TP, AttnCPSize: r.CP, AttnCPRank: r.Rank.CP,
		AttnDPSize: 1, PPSize: r.PP, PPRank: r.Rank.PP, SystemDPSize: r.DP, SystemDPRank: r.Rank.DP,
		RankIP: r.IP, RankPort: r.Port, PageSize: r.PageSize, KVDType: optional(r.KVDType), LoadBalance: followRoom,
		KVLayout: r.KVLayout, LayerSplit: r.LayerSplit, KVSharding: r.KVSharding, HTTPPort: r.PrefillHTTPPort,
		SpecLayout: json.RawMessage(r.SpecLayout), Policy: r.AllocationPolicy,
	}
	if !r.FollowRoom {
		b.LoadBalance = "round_robin"
	}
	return json.Marshal(b)
}

// infoBody is the answer to the topology query. SGLang's decodes build a record
// of fixed fields from it and fail on a key that they do not know, and each
// version knows others. The first seven are in all of them and always sent;
// any other only when it differs from its default.
type infoBody struct {
	AttnTPSize int             `json:"attn_tp_size"`
	AttnCPSize int             `json:"attn_cp_size"`
	DPSize     int             `json:"dp_size"`
	PPSize     int             `json:"pp_size"`
	PageSize   *int            `json:"page_size"`
	KVDType    *string         `json:"kv_cache_dtype"`
	FollowRoom bool            `json:"follow_bootstrap_room"`
	LayerSplit bool            `json:"enable_dsa_cache_layer_split,omitempty"`
	HTTPPort   int             `json:"prefill_http_port,omitempty"`
	Policy     string          `json:"decode_allocation_policy,omitempty"`
	SpecLayout json.RawMessage `json:"dsv41_spec_layout,omitempty"`
	KVSharding bool            `json:"enable_kv_cache_sharding,omitempty"`
	KVLayout   string          `json:"kv_layout,omitempty"`
}

func (i *Info) body() ([]byte, error) {
	return json.Marshal(infoBody{
		AttnTPSize: i.TP, AttnCPSize: i.CP, DPSize: i.DP, PPSize: i.PP,
		PageSize: optional(i.PageSize), KVDType: optional(i.KVDType), FollowRoom: i.FollowRoom,
		LayerSplit: i.LayerSplit, HTTPPort: i.PrefillHTTPPort, Policy: i.AllocationPolicy,
		SpecLayout: json.RawMessage(i.SpecLayout), KVSharding: i.KVSharding, KVLayout: i.KVLayout,
	})
}

// optional is null for the zero value.
func optional[T comparable](v T) *T {
	var zero T
	if v == zero {
		return nil
	}
	return &v
}

// parseInfo reads the answer to the topology query. Whatever cannot be a
// prefill's parallel info is an error here, so that nothing behind it meets a
// size of zero, a list or a word.
func parseInfo(body []byte) (Info, error) {
	o, err := parseObject(body)
	if err != nil {
		return Info{}, err
	}
	if err := o.missing("page_size", "kv_cache_dtype", "follow_bootstrap_room"); err != nil {
		return Info{}, err
	}
	var i Info
	for _, size := range []struct {
		key string
		to  *int
	}{{"attn_tp_size", &i.TP}, {"attn_cp_size", &i.CP}, {"dp_size", &i.DP}, {"pp_size", &i.PP}} {
		if *size.to, err = o.int(size.key, 1, maxRanks); err != nil {
			return Info{}, err
		}
	}
	if !i.sized() {
		return Info{}, fmt.Errorf("dp %d · cp %d · tp %d · pp %d is more than %d ranks", i.DP, i.CP, i.TP, i.PP, maxRanks)
	}
	if !o.null("page_size") {
		if i.PageSize, err = o.int("page_size", 1, math.MaxInt32); err != nil {
			return Info{}, err
		}
	}
	if i.KVDType, err = o.text("kv_cache_dtype"); err != nil {
		return Info{}, err
	}
	if i.KVDType == "auto" {
		i.KVDType = "" // says nothing about the dtype, as null
	}
	if i.FollowRoom, err = o.flag("follow_bootstrap_room"); err != nil {
		return Info{}, err
	}
	return i, i.parseOptional(o)
}

// rankBody is the answer to a rank query.
type rankBody struct {
	IP   string `json:"rank_ip"`
	Port int    `json:"rank_port"`
}

func (b rankBody) body() ([]byte, error) { return json.Marshal(b) }

// parseRank reads the answer to a rank query.
func parseRank(body []byte) (ip string, port int, err error) {
	o, err := parseObject(body)
	if err != nil {
		return "", 0, err
	}
	if err := o.missing("rank_ip"); err != nil {
		return "", 0, err
	}
	if ip, err = o.text("rank_ip"); err != nil {
		return "", 0, err
	}
	if ip, err = CheckHost(ip); err != nil {
		return "", 0, fmt.Errorf(`"rank_ip": %w`, err)
	}
	port, err = o.int("rank_port", 1, math.MaxUint16)
	return ip, port, err
}

// parseRoom reads the body of POST /register_dp_rank. SGLang checks no range.
func parseRoom(body []byte) (room int64, dp int, err error) {
	o, err := parseObject(body)
	if err != nil {
		return 0, 0, err
	}
	n, err := o.int("bootstrap_room", math.MinInt64, math.MaxInt64)
	if err != nil {
		return 0, 0, err
	}
	dp, err = o.int("dp_rank", math.MinInt32, math.MaxInt32)
	return int64(n), dp, err
}

// parseRooms reads the body of POST /query_dp_ranks.
func parseRooms(body []byte) ([]int64, error) {
	o, err := parseObject(body)
	if err != nil {
		return nil, err
	}
	if err := o.missing("bootstrap_rooms"); err != nil {
		return nil, err
	}
	var raw []json.RawMessage
	if err := json.Unmarshal(o["bootstrap_rooms"], &raw); err != nil || raw == nil {
		return nil, fmt.Errorf(`"bootstrap_rooms" is %s, want a list of rooms`, short(string(o["bootstrap_rooms"])))
	}
	rooms := make([]int64, len(raw))
	for i := range raw {
		if rooms[i], err = integer(raw[i]); err != nil {
			return nil, fmt.Errorf(`"bootstrap_rooms" holds %s, want integers`, short(string(raw[i])))
		}
	}
	return rooms, nil
}

// appendRanks appends the answer to POST /query_dp_ranks.
func appendRanks(b []byte, rooms []int64, rank func(room int64) (dp int, ok bool)) []byte {
	b = append(b, '{')
	first := true
	for _, room := range rooms {
		dp, ok := rank(room)
		if !ok {
			continue
		}
		if !first {
			b = append(b, ", "...)
		}
		first = false
		b = append(b, '"')
		b = strconv.AppendInt(b, room, 10)
		b = append(b, `": `...)
		b = strconv.AppendInt(b, int64(dp), 10)
	}
	return append(b, '}')
}

// parseRanks reads the answer to POST /query_dp_ranks. A null rank is an
// unknown room; rooms that nobody asked for are left to the caller.
func parseRanks(body []byte) (map[int64]int, error) {
	o, err := parseObject(body)
	if err != nil {
		return nil, err
	}
	ranks := make(map[int64]int, len(o))
	//metronome:unordered it fills a map, and any of the bad entries may be the one that is told
	for key := range o {
		if o.null(key) {
			continue
		}
		room, err := decimal(key)
		if err != nil {
			return nil, fmt.Errorf("%s is no room", short(strconv.Quote(key)))
		}
		if ranks[room], err = o.int(key, 0, maxRanks); err != nil {
			return nil, fmt.Errorf("the DP rank of room %w", err)
		}
	}
	return ranks, nil
}

// CheckHost gives a host as it is dialled: an address that a peer can mean, or
// a name; IPv6 without brackets.
func CheckHost(host string) (string, error) {
	if n := len(host); n > 2 && host[0] == '[' && host[n-1] == ']' {
		host = host[1 : n-1]
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		if ip.IsUnspecified() || ip.IsMulticast() {
			return "", fmt.Errorf("%s is no address that a peer can dial", host)
		}
		return host, nil
	}
	if host == "" || len(host) > maxHost {
		return "", fmt.Errorf("%s is no address or name", short(strconv.Quote(host)))
	}
	for _, c := range []byte(host) {
		letter := c|0x20 >= 'a' && c|0x20 <= 'z'
		if !letter && (c < '0' || c > '9') && c != '.' && c != '-' && c != '_' {
			return "", fmt.Errorf("%s is no address or name", short(strconv.Quote(host)))
		}
	}
	return host, nil
}

// loopback says that the host, an address or a name, means this machine to
// whoever dials it.
func loopback(host string) bool {
	if ip, err := netip.ParseAddr(host); err == nil {
		return ip.Unmap().IsLoopback()
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	return host == "localhost" || strings.HasSuffix(host, ".localhost")
}

// visible is a header's value if it is a word of visible ASCII, else "".
func visible(s string) string {
	if len(s) > maxWord {
		return ""
	}
	for _, c := range []byte(s) {
		if c <= ' ' || c > '~' {
			return ""
		}
	}
	return s
}

// short makes a peer's text fit for a message: one line of at most 120 bytes.
func short(s string) string {
	const limit = 120
	cut := len(s) > limit
	if cut {
		s = s[:limit]
	}
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == '\uFFFD' {
			return ' '
		}
		return r
	}, s)
	if cut {
		s += "…"
	}
	return strings.TrimSpace(s)
}
