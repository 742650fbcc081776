package model

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"unsafe"
)

// File is an opened, checked model file. Everything but Close may be called
// from many goroutines.
type File struct {
	Name  string // the name it was opened by: the base of the path without .gguf, or the name given to OpenBytes
	Title string // what the file calls itself (general.name), or ""
	Arch  string // general.architecture

	path    string // for error messages
	data    []byte
	unmap   func() error
	keys    map[string]value
	tensors map[string]Tensor
	names   []string // of tensors, sorted
	print   func() string
}

// Open maps the file at path and checks it. The caller closes it.
func Open(path string) (*File, error) {
	// A stat first: opening a pipe or a device could wait for ever.
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: not a regular file", path)
	}
	h, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	if info, err = h.Stat(); err != nil {
		return nil, err
	}
	if info.Size() < headSize || info.Size() != int64(int(info.Size())) {
		return nil, fmt.Errorf("%s: %d bytes is no GGUF file", path, info.Size())
	}
	data, unmap, err := mapFile(h, int(info.Size()))
	if err != nil {
		return nil, err
	}
	f, err := parse(path, data)
	if err != nil {
		return nil, errors.Join(err, unmap())
	}
	f.Name = strings.TrimSuffix(filepath.Base(path), ".gguf")
	f.unmap = unmap
	return f, nil
}

// OpenBytes checks a file that is in memory already, such as Builtin(). The
// bytes must not change while the File is in use.
func OpenBytes(name string, b []byte) (*File, error) {
	if addr := uintptr(unsafe.Pointer(unsafe.SliceData(b))); addr%64 != 0 {
		// Embedded bytes lie anywhere, but views of f16 and f32 need their alignment.
		aligned := make([]byte, len(b)+64)
		skip := -uintptr(unsafe.Pointer(unsafe.SliceData(aligned))) % 64
		aligned = aligned[skip:][:len(b):len(b)]
		copy(aligned, b)
		b = aligned
	}
	f, err := parse(name, b)
	if err != nil {
		return nil, err
	}
	f.Name = name
	f.unmap = func() error { return nil }
	return f, nil
}

// Close ends the mapping. No view of a tensor may be used after it.
func (f *File) Close() error {
	if f.unmap == nil {
		return nil
	}
	unmap := f.unmap
	f.unmap = nil
	return unmap()
}

// Holds says whether the file is mapped at an address.
func (f *File) Holds(addr uintptr) bool {
	first := uintptr(unsafe.Pointer(unsafe.SliceData(f.data)))
	return addr-first < uintptr(len(f.data))
}

// Size is the size of the file in bytes.
func (f *File) Size() int { return len(f.data) }

// Tensor returns the tensor of that name.
func (f *File) Tensor(name string) (Tensor, bool) {
	t, ok := f.tensors[name]
	return t, ok
}

// Tensors are the names of all tensors, sorted. The order in the file means nothing.
func (f *File) Tensors() []string { return f.names }

// Quantisation is the format that most parameters have, for people.
func (f *File) Quantisation() string {
	var most Type
	values := map[Type]int{}
	for _, name := range f.names {
		t := f.tensors[name]
		values[t.Type] += t.Values()
		if values[t.Type] > values[most] {
			most = t.Type
		}
	}
	return most.String()
}

// Parameters is how many numbers all tensors hold.
func (f *File) Parameters() int {
	n := 0
	for _, name := range f.names {
		n += f.tensors[name].Values()
	}
	return n
}

// parse checks a whole file. What it returns points into data.
func parse(path string, data []byte) (*File, error) {
	f := &File{path: path, data: data, keys: map[string]value{}, tensors: map[string]Tensor{}}
	r := &reader{b: data}
	tensors, keys := r.head()
	r.keys(f.keys, keys)
	infos := r.tensors(tensors)
	if r.err != nil {
		return nil, fmt.Errorf("%s: %w", path, r.err)
	}
	if err := f.place(infos, r.at); err != nil {
		return nil, err
	}
	if err := f.checkKind(); err != nil {
		return nil, err
	}
	var err error
	if f.Title, _, err = f.text("general.name"); err != nil {
		return nil, err
	}
	var ok bool
	if f.Arch, ok, err = f.text("general.architecture"); err != nil {
		return nil, err
	} else if !ok || f.Arch == "" {
		return nil, f.errorf("key \"general.architecture\" is missing")
	}
	f.print = sync.OnceValue(f.fingerprint)
	return f, nil
}

// checkKind refuses files that are no whole model of today's layouts.
func (f *File) checkKind() error {
	if kind, ok, err := f.text("general.type"); err != nil {
		return err
	} else if ok && kind != "model" {
		return f.errorf("key \"general.type\": %q is no model", kind)
	}
	if n, ok, err := f.integer("split.count", 0, math.MaxInt); err != nil {
		return err
	} else if ok && n > 1 {
		return f.errorf("key \"split.count\": this is one of %d parts of a model; join them to one file", n)
	}
	if n, ok, err := f.integer("general.quantization_version", 0, math.MaxInt); err != nil {
		return err
	} else if ok && n != quantVersion {
		return f.errorf("key \"general.quantization_version\": is %d, only the layouts of version %d are known", n, quantVersion)
	}
	return nil
}

// quantVersion is ggml's version of the quantised formats. It rises when a
// layout changes.
const quantVersion = 2

// place turns tensor records into views: it checks type, size, alignment and
// bounds of each, and that no two overlap. end is where the records end.
func (f *File) place(infos []tensorInfo, end int) error {
	align, ok, err := f.integer("general.alignment", 8, 1<<20)
	if err != nil {
		return err
	}
	if !ok {
		align = 32
	}
	if align&(align-1) != 0 {
		return f.errorf("key \"general.alignment\": %d is not a power of two", align)
	}
	base := (end + align - 1) / align * align
	if base > len(f.data) && len(infos) > 0 {
		return f.errorf("truncated: tensor data should begin at offset %d, the file has %d bytes", base, len(f.data))
	}
	for _, t := range infos {
		size, err := t.size()
		if err != nil {
			return f.errorf("%w", err)
		}
		room := uint64(len(f.data) - base)
		if t.offset%uint64(align) != 0 {
			return f.errorf("tensor %q: offset %d is not a multiple of the alignment %d", t.name, t.offset, align)
		}
		if t.offset > room || size > room-t.offset {
			return f.errorf("tensor %q: truncated: %d bytes at data offset %d, but the data have %d bytes", t.name, size, t.offset, room)
		}
		if _, ok := f.tensors[t.name]; ok {
			return f.errorf("tensor %q: appears twice", t.name)
		}
		from := base + int(t.offset)
		f.tensors[t.name] = Tensor{Name: t.name, Type: t.kind, Shape: t.shape, Data: f.data[from : from+int(size) : from+int(size)]}
		f.names = append(f.names, t.name)
	}
	sort.Strings(f.names)
	sort.Slice(infos, func(i, j int) bool { return infos[i].offset < infos[j].offset })
	for i := 1; i < len(infos); i++ {
		if a, b := infos[i-1], infos[i]; a.offset+uint64(len(f.tensors[a.name].Data)) > b.offset {
			return f.errorf("tensor %q: overlaps tensor %q", b.name, a.name)
		}
	}
	return nil
}

// errorf is an error that names the file.
func (f *File) errorf(format string, args ...any) error {
	return fmt.Errorf("%s: %w", f.path, line(format, args...))
}
