/* Model of one secure stream: its two ends, and a server that may lie.  index.md explains what it shows.

   The two ends follow docs/protocol/secure-transport.md, section "Resuming".  Each transport has keys of its own, so
   the server cannot change, repeat or invent a frame.  It can delay frames, tell an end that a transport is lost, and
   drop a frame; then all later frames in this direction vanish, or show the receiver that one is missing (BAD).

   A timer fires when nothing else can happen (Spin's "timeout").  An earlier timer is modelled as one of the server's
   faults, because it moves the stream in the same way.

   The names in #ifdef remove one rule each.  Without this rule, Spin must find an error. */

#ifndef TRANSPORTS
#define TRANSPORTS 3     /* maximum number of transports of the stream, each of one generation */
#endif
#ifndef FAULTS
#define FAULTS 2         /* maximum number of faults: lies of the server, DRAIN, pauses of the responder's application */
#endif
#ifdef NO_PROBE
#define MAY_PROBE false
#elif defined(NO_PROBE_AT_CLOSED_WINDOW)
#define MAY_PROBE i_window
#else
#define MAY_PROBE true
#endif
#ifdef NO_GENERATIONS
#define IS_NEXT(g) true
#else
#define IS_NEXT(g) (g > r_generation)
#endif
#ifdef FORGETS_CLOSED
#define ENDED_REASON 19
#else
#define ENDED_REASON 0
#endif
#define UNITS 2          /* frames that each end sends: one of data, then the half-close */
#define ROOM 8           /* maximum number of frames in transit in one direction of one transport */
#define FORGED TRANSPORTS  /* transport of a forged RESUME, with a higher generation than any other */
#define CHANNELS (TRANSPORTS + 1)
#define NONE 255

mtype = { FWD, EMPTY, ACK, CLOSE, MOVED, REQUEST, ACCEPT, ENDED, BAD };
mtype = { OPEN, SUSPENDED, CLOSED };
mtype = { AS_IT_IS, VANISH, GAP };

/* Frames in transit, for each transport.  The byte is a position of the stream, plus 16 if the window is closed. */
chan to_r[CHANNELS] = [ROOM] of { mtype, byte };
chan to_i[CHANNELS] = [ROOM] of { mtype, byte };
mtype carries_r[CHANNELS] = AS_IT_IS;   /* what the server does with frames to the responder */
mtype carries_i[CHANNELS] = AS_IT_IS;
bit lost_i[CHANNELS];                   /* whether this end has lost or left the transport */
bit lost_r[CHANNELS];
byte faults = FAULTS;

/* The initiator */
mtype i_state = OPEN;
byte i_transport = 0;
byte i_generation = 0;
byte i_sent = 0; byte i_acked = 0; byte i_received = 0;
bit i_asking = 0;        /* a REQUEST with RESUME is unanswered */
bit i_unproven = 0;      /* the responder has answered RESUME, but not proved that it has moved */
byte i_agreed = 0;       /* position in the responder's answer */
bit i_probing = 0;       /* a FWD without data is unacknowledged */
bit i_window = 1;        /* whether the responder's window is open, as far as the initiator knows */
bit i_clean = 0;         /* the stream has ended, and both directions are complete */
bit i_gave_up = 0;        /* all transports of the model are used */
bit i_decided = 0;       /* whether the application has decided whether to close the stream early */
bit i_closing = 0;       /* the application has closed the stream; data written before is still sent */
byte i_units = UNITS;    /* frames that the initiator sends before it closes */
bit i_said_close = 0;    /* the initiator has sent CLOSE; the server may have dropped it */

/* The responder */
mtype r_state = OPEN;
byte r_transport = 0;
byte r_generation = 0;
byte r_sent = 0; byte r_acked = 0;
byte r_received = 0;     /* position on the present transport */
byte r_given = 0;        /* position up to which the application has received data */
byte r_delivered = 0;    /* number of frames that the application has received */
bit r_window = 1;        /* whether the application reads, so that the window is open */
bit r_told = 1;          /* value of r_window in the last ACK or ACCEPT */
bit r_clean = 0;
bit r_decided = 0;
bit r_closing = 0;
byte r_units = UNITS;
bit answered[CHANNELS];  /* unconfirmed answers to RESUMEs */
byte answer_received[CHANNELS];  /* position in the RESUME */
byte answer_base[CHANNELS];      /* position in the answer */

inline tell_r(g, m, v) {
    if
    :: lost_r[g] || carries_r[g] == VANISH -> skip
    :: !lost_r[g] && carries_r[g] == GAP -> if :: len(to_r[g]) < ROOM -> to_r[g]!BAD,0 :: len(to_r[g]) == ROOM -> skip fi
    :: !lost_r[g] && carries_r[g] == AS_IT_IS -> assert(len(to_r[g]) < ROOM); to_r[g]!m,v
    fi
}
inline tell_i(g, m, v) {
    if
    :: lost_i[g] || carries_i[g] == VANISH -> skip
    :: !lost_i[g] && carries_i[g] == GAP -> if :: len(to_i[g]) < ROOM -> to_i[g]!BAD,0 :: len(to_i[g]) == ROOM -> skip fi
    :: !lost_i[g] && carries_i[g] == AS_IT_IS -> assert(len(to_i[g]) < ROOM); to_i[g]!m,v
    fi
}
inline ack_r(g) { /* the responder acknowledges all data received so far */
    tell_i(g, ACK, r_received + 16 * (1 - r_window)); r_told = r_window
}
inline forget_i(g) { /* the initiator ignores a transport from now on */
    lost_i[g] = 1;
    do :: len(to_i[g]) > 0 -> to_i[g]?m,v :: len(to_i[g]) == 0 -> break od
}
inline forget_r(g) {
    lost_r[g] = 1; answered[g] = 0;
    do :: len(to_r[g]) > 0 -> to_r[g]?m,v :: len(to_r[g]) == 0 -> break od
}
inline forget_old(t) {
    lost_r[t] = 1;
    do :: len(to_r[t]) > 0 -> to_r[t]?_,_ :: len(to_r[t]) == 0 -> break od
}
inline drop(frames, carries) { /* the frames behind the dropped one vanish too, or show that it is missing */
    do :: len(frames) > 0 -> frames?_,_ :: len(frames) == 0 -> break od;
    if :: carries = VANISH :: carries = GAP :: carries = GAP; frames!BAD,0 fi
}
inline suspend_i() { i_state = SUSPENDED; i_transport = NONE; i_unproven = 0; i_probing = 0; i_asking = 0 }
inline suspend_r() { r_state = SUSPENDED; r_transport = NONE }
inline prove() { /* the first authentic frame on a new transport proves that the responder has moved */
    if :: i_unproven -> i_unproven = 0; i_acked = i_agreed; i_sent = i_agreed :: !i_unproven -> skip fi
}
inline close_r(clean) {
    r_state = CLOSED; r_clean = clean;
    assert(!r_clean || i_received == UNITS);
    g = 0;
    do
    :: g < CHANNELS -> if :: answered[g] -> tell_i(g, CLOSE, 0); answered[g] = 0 :: !answered[g] -> skip fi; g++
    :: g == CHANNELS -> break
    od
}
inline acknowledged_i(n) {
    /* only what the responder's application has received is acknowledged */
    assert(n <= r_given); assert(n >= i_acked && n <= i_sent);
    i_acked = n; i_probing = 0
}

active proctype Initiator() {
    mtype m; byte v; byte n; byte old;
    do
    :: atomic { i_state == OPEN && !i_unproven && i_window && i_sent < i_units -> tell_r(i_transport, FWD, i_sent); i_sent++ }
    /* --- the application closes the stream */
    :: atomic { i_state != CLOSED && !i_decided -> i_decided = 1; if :: i_closing = 1; i_units = i_sent :: skip fi }
#ifdef CLOSES_SUSPENDED
    :: atomic { i_closing && i_acked == i_units && i_state == SUSPENDED && !i_asking -> i_state = CLOSED }
#endif
    :: atomic { i_closing && i_acked == i_units && i_state == OPEN && !i_unproven && !i_probing ->
        tell_r(i_transport, CLOSE, 0); i_said_close = 1; i_state = CLOSED; i_clean = (i_acked == UNITS && i_received == UNITS) }
    /* --- frames */
    :: atomic { i_state == OPEN && len(to_i[i_transport]) > 0 -> old = i_transport; to_i[old]?m,v;
        if
        :: m == FWD ->
            prove(); assert(v == i_received); i_received++; tell_r(old, ACK, i_received)
        :: m == ACK -> prove(); n = v % 16; i_window = 1 - v / 16; acknowledged_i(n)
        :: m == CLOSE -> i_state = CLOSED; i_clean = (i_acked == UNITS && i_received == UNITS); assert(!i_clean || r_given == UNITS)
        :: m == MOVED || m == BAD -> if :: m == BAD -> tell_r(old, MOVED, 0) :: m != BAD -> skip fi; forget_i(old); suspend_i()
        :: m == ACCEPT || m == ENDED || m == EMPTY || m == REQUEST -> assert(false)
        fi; m = 0; v = 0; n = 0; old = 0 }
    :: atomic { i_state == OPEN && lost_i[i_transport] -> suspend_i() }
    /* --- resuming */
    :: atomic { i_state == SUSPENDED && !i_asking && i_generation + 1 < TRANSPORTS ->
        i_generation++; i_asking = 1; tell_r(i_generation, REQUEST, i_received) }
    :: atomic { i_state == SUSPENDED && i_asking && lost_i[i_generation] -> i_asking = 0 }
    :: atomic { i_state == SUSPENDED && i_asking && len(to_i[i_generation]) > 0 -> old = i_generation; to_i[old]?m,v;
        i_asking = 0;
        if
        :: m == ACCEPT ->
            n = v % 16; i_window = 1 - v / 16;
            assert(n >= i_acked && n <= i_sent);
            i_agreed = n; i_transport = old; i_state = OPEN; i_unproven = 1; i_probing = 0;
#ifdef SENDS_UNPROVEN
            prove();
#endif
            tell_r(old, ACK, i_received); tell_r(old, EMPTY, 0)
        :: m == ENDED ->
            /* ENDED comes only from a responder that has closed the stream */
            assert(r_state == CLOSED);
            /* a complete stream ends without an error at both ends */
            assert(!r_clean || v == 0); i_state = CLOSED; i_clean = (v == 0 && i_acked == UNITS && i_received == UNITS); assert(!i_clean || r_given == UNITS)
        :: m == CLOSE || m == MOVED || m == BAD -> forget_i(old)
        :: m == FWD || m == ACK || m == EMPTY || m == REQUEST -> assert(false)
        fi; m = 0; v = 0; n = 0; old = 0 }
    /* --- DRAIN: the stream moves while it still has its transport */
    :: atomic { i_state == OPEN && !i_unproven && faults > 0 && i_generation + 1 < TRANSPORTS ->
        faults--; old = i_transport; tell_r(old, MOVED, 0); forget_i(old); suspend_i(); m = 0; v = 0; old = 0 }
    /* --- timers, which fire when nothing else can happen */
    :: atomic { timeout && i_state == SUSPENDED && i_asking -> /* REQUEST_TIMEOUT */
        old = i_generation; tell_r(old, MOVED, 0); forget_i(old); i_asking = 0; m = 0; v = 0; old = 0 }
    :: atomic { timeout && i_state == OPEN && !i_probing && !i_unproven && i_sent == i_acked && MAY_PROBE && !(i_acked == UNITS && i_received == UNITS) ->  /* PROBE_AFTER */
        tell_r(i_transport, EMPTY, 0); i_probing = 1 }
    :: atomic { timeout && i_state == OPEN && (i_probing || i_unproven || i_sent > i_acked) && i_generation + 1 < TRANSPORTS -> /* STALL_TIME */
        old = i_transport; tell_r(old, MOVED, 0); forget_i(old); suspend_i(); m = 0; v = 0; old = 0 }
    :: atomic { timeout && i_state == OPEN && i_acked == UNITS && i_received == UNITS -> /* CLOSE_WAIT */
        tell_r(i_transport, CLOSE, 0); i_said_close = 1; i_state = CLOSED; i_clean = 1; assert(r_given == UNITS) }
    /* --- end of the model: the stream is closed, or no transport is left */
    :: i_state == CLOSED -> break
    :: timeout && i_state != CLOSED && i_generation + 1 == TRANSPORTS && !i_asking && (i_state == SUSPENDED || i_probing || i_unproven || i_sent > i_acked) ->
        /* each fault costs at most one transport */
        assert(FAULTS >= TRANSPORTS); i_gave_up = 1; break
    od
}

inline take_r(t) { /* the responder receives a FWD with data */
    assert(v == r_received);   /* no data is lost, repeated or reordered */
    r_received++;
    if
    :: r_received > r_given -> r_given = r_received; r_delivered++
#ifdef DELIVERS_AGAIN
    :: r_received <= r_given -> r_delivered++
#else
    :: r_received <= r_given -> skip
#endif
    fi;
    assert(r_delivered == r_given);   /* the application receives nothing twice */
    ack_r(t)
}
inline follow() { /* the responder moves to transport g, which frame m has confirmed */
    answered[g] = 0; r_generation = g;
    /* the initiator's position fits what the responder has sent */
    assert(answer_received[g] >= r_acked && answer_received[g] <= r_sent);
    r_acked = answer_received[g]; r_sent = r_acked; r_received = answer_base[g];
    old = r_transport; r_transport = g; r_state = OPEN;
    if :: old != NONE -> tell_i(old, MOVED, 0); forget_old(old) :: old == NONE -> skip fi;
    if
    :: m == EMPTY -> ack_r(g)
    :: m == ACK -> assert(v <= i_received && v == r_acked)
    :: m == FWD -> take_r(g)
    :: m == REQUEST -> skip
    fi
}
inline other_frame() { /* a frame arrives on transport g, which does not carry the stream */
    to_r[g]?m,v;
    if
    :: m == REQUEST && r_state == CLOSED -> tell_i(g, ENDED, ENDED_REASON)
    :: m == REQUEST && r_state != CLOSED && !IS_NEXT(g) -> tell_i(g, ENDED, 19)
    :: m == REQUEST && r_state != CLOSED && IS_NEXT(g) ->
        answered[g] = 1; answer_received[g] = v; answer_base[g] = r_received;
        tell_i(g, ACCEPT, r_received + 16 * (1 - r_window)); r_told = r_window;
#ifdef NO_CONFIRMATION
        follow()
#endif
    :: m == BAD || m == MOVED || m == CLOSE ->
        if :: m == BAD && answered[g] -> tell_i(g, MOVED, 0) :: !(m == BAD && answered[g]) -> skip fi;
        forget_r(g)
    :: (m == ACK || m == EMPTY || m == FWD) && answered[g] && !IS_NEXT(g) -> tell_i(g, MOVED, 0); forget_r(g)
    :: (m == ACK || m == EMPTY || m == FWD) && answered[g] && IS_NEXT(g) -> follow()
    :: (m == ACK || m == EMPTY || m == FWD) && !answered[g] -> skip
    fi;
    m = 0; v = 0; g = 0; old = 0
}

active proctype Responder() {
    mtype m; byte v; byte g; byte old;
    do
    :: atomic { r_state == OPEN && r_sent < r_units && !r_closing -> tell_i(r_transport, FWD, r_sent); r_sent++ }
    /* --- the application pauses, and reads again */
    :: atomic { r_state != CLOSED && r_window && r_given == 0 && faults > 0 -> faults--; r_window = 0 }
    :: atomic { r_state != CLOSED && !r_window -> r_window = 1;
        if :: r_state == OPEN && !r_told -> ack_r(r_transport) :: !(r_state == OPEN && !r_told) -> skip fi }
    /* --- the application closes the stream */
    :: atomic { r_state != CLOSED && !r_decided -> r_decided = 1; if :: r_closing = 1; r_units = r_sent :: skip fi }
    :: atomic { r_state != CLOSED && r_closing && r_acked == r_units ->
        if :: r_state == OPEN -> tell_i(r_transport, CLOSE, 0) :: r_state == SUSPENDED -> skip fi;
        close_r(r_acked == UNITS && r_given == UNITS); g = 0 }
    /* --- both directions have ended */
    :: atomic { r_state == OPEN && r_acked == UNITS && r_given == UNITS ->
        tell_i(r_transport, CLOSE, 0); close_r(1); g = 0 }
    /* --- frames of the present transport */
    :: atomic { r_state == OPEN && len(to_r[r_transport]) > 0 -> old = r_transport; to_r[old]?m,v;
        if
        :: m == FWD -> take_r(old)
        :: m == EMPTY -> ack_r(old)
        :: m == ACK -> assert(v <= i_received); assert(v >= r_acked && v <= r_sent); r_acked = v
        :: m == CLOSE -> close_r(r_acked == UNITS && r_given == UNITS)
        :: m == MOVED || m == BAD -> if :: m == BAD -> tell_i(old, MOVED, 0) :: m != BAD -> skip fi; forget_r(old); suspend_r()
        :: m == REQUEST || m == ACCEPT || m == ENDED -> assert(false)
        fi; m = 0; v = 0; g = 0; old = 0 }
    :: atomic { r_state == OPEN && lost_r[r_transport] -> suspend_r() }
    /* --- REQUESTs and confirmations on other transports */
    :: atomic { len(to_r[0]) > 0 && r_transport != 0 -> g = 0; other_frame() }
    :: atomic { len(to_r[1]) > 0 && r_transport != 1 -> g = 1; other_frame() }
#if TRANSPORTS > 2
    :: atomic { len(to_r[2]) > 0 && r_transport != 2 -> g = 2; other_frame() }
#endif
#if TRANSPORTS > 3
    :: atomic { len(to_r[3]) > 0 && r_transport != 3 -> g = 3; other_frame() }
#endif
    :: atomic { len(to_r[FORGED]) > 0 && r_transport != FORGED -> g = FORGED; other_frame() }
    /* --- timers */
    :: atomic { timeout && r_state == OPEN && r_sent > r_acked -> /* STALL_TIME */
        old = r_transport; tell_i(old, MOVED, 0); forget_r(old); suspend_r(); m = 0; v = 0; old = 0 }
    :: atomic { timeout && answered[1] -> tell_i(1, MOVED, 0); forget_r(1); m = 0; v = 0 } /* CONFIRM_TIMEOUT */
    :: atomic { timeout && TRANSPORTS > 2 && answered[2] -> tell_i(2, MOVED, 0); forget_r(2); m = 0; v = 0 }
    :: atomic { timeout && answered[FORGED] -> forget_r(FORGED); m = 0; v = 0 }
    /* --- end of the model: the responder stops waiting only for an initiator that has sent CLOSE */
    :: timeout && (r_state == CLOSED || i_said_close) && i_state == CLOSED -> goto done
    :: timeout && i_gave_up -> goto done
    od;
done: skip
}

active proctype Server() {
    mtype m; byte v; byte g;
end:
    do
    :: atomic { faults > 0 -> faults--;
        select (g : 0 .. TRANSPORTS - 1);
        if
        :: lost_i[g] == 0 -> forget_i(g)              /* tell one end that the transport is lost */
        :: lost_r[g] == 0 -> forget_r(g)
        :: carries_r[g] == AS_IT_IS && len(to_r[g]) > 0 -> drop(to_r[g], carries_r[g])  /* drop a frame */
        :: carries_i[g] == AS_IT_IS && len(to_i[g]) > 0 -> drop(to_i[g], carries_i[g])
#ifdef THIEF
        :: len(to_r[FORGED]) < ROOM -> to_r[FORGED]!REQUEST,0  /* forge a RESUME, with the responder's stolen key */
#endif
        :: true -> skip
        fi;
        m = 0; v = 0; g = 0 }
    od
}
