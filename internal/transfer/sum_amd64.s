#include "textflag.h"

// func fetch(p *byte, n int)
TEXT ·fetch(SB), NOSPLIT, $0-16
	MOVQ p+0(FP), SI
	MOVQ n+8(FP), CX

line:
	PREFETCHT0 (SI)
	ADDQ       $64, SI
	SUBQ       $64, CX
	JG         line
	RET

// func claim(p *byte, n int)
TEXT ·claim(SB), NOSPLIT, $0-16
	MOVQ p+0(FP), SI
	MOVQ n+8(FP), CX

line:
	BYTE $0x0F; BYTE $0x0D; BYTE $0x0E // PREFETCHW (SI), which the assembler does not know
	ADDQ      $64, SI
	SUBQ      $64, CX
	JG        line
	RET
