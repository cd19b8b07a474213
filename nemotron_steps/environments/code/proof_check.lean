import Lean
open Lean

/-!
Reads two modules, without importing either: nothing that they hold is run. `Stated.olean` is the row's theorem with
`sorry` for its proof, `Given.olean` the same theorem with the answer's, written by a process that may have run whatever
the answer says. The kernel checks anew the answer's proof against the row's statement and all that the proof is made of,
over what the row imports. Fails where it refuses, and for a theorem that rests on another axiom than the usual three.
-/

/-- `names` with the constants that a term mentions. -/
def withConstants (names : List Name) (term : Expr) : List Name :=
  term.getUsedConstants.toList.foldl (fun names name => .cons name names) names

/-- The axioms under `names`, but for those that are `seen`. -/
partial def axioms (env : Environment) (seen : NameSet) (names : List Name) : List Name :=
  match names with
  | .nil => .nil
  | .cons name rest =>
    match seen.contains name, env.find? name with
    | false, some (.axiomInfo _) => .cons name (axioms env (seen.insert name) rest)
    | false, some (.thmInfo v) => axioms env (seen.insert name) (withConstants (withConstants rest v.type) v.value)
    | false, some (.defnInfo v) => axioms env (seen.insert name) (withConstants (withConstants rest v.type) v.value)
    | false, some (.opaqueInfo v) => axioms env (seen.insert name) (withConstants (withConstants rest v.type) v.value)
    | false, some info => axioms env (seen.insert name) (withConstants rest info.type)
    | _, _ => axioms env seen rest

def main : IO Unit := do
  let (stated, _) ← readModuleData "Stated.olean"
  let (given, _) ← readModuleData "Given.olean"
  let answer := given.constants.toList.foldl (init := ({} : Std.HashMap Name ConstantInfo)) fun all info =>
    all.insert info.name info
  -- What the row declares goes before what the answer does; of its theorems, the answer has the proofs alone.
  let new := stated.constants.toList.foldl (init := answer) fun all info =>
    match info, answer.get? info.name with
    | .thmInfo row, some (.thmInfo proof) => all.insert row.name (.thmInfo { row with value := proof.value })
    | _, _ => all.insert info.name info
  let theorems := stated.constants.toList.foldl (init := List.nil) fun names info =>
    match info with
    | .thmInfo row => .cons row.name names
    | _ => names
  let imported ← importModules stated.imports Options.empty
  let env ← imported.replay new
  let usual := ((NameSet.empty.insert `propext).insert `Classical.choice).insert `Quot.sound
  match theorems, axioms env usual theorems with
  | .nil, _ => throw (IO.userError "the row states no theorem")
  | _, .nil => pure ()
  | _, .cons name _ => throw (IO.userError ("the proof rests on the axiom ".append name.toString))
